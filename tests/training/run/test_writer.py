"""What is written in the background is written in order, and its errors are not lost."""

from __future__ import annotations

import threading

import pytest
from patience import wait_for

from tpucache import TrainingError
from tpucache.training.run.files import BackgroundWriter


def test_writes_come_in_order_and_all_before_the_end():
    written = []
    with BackgroundWriter() as writer:
        for number in range(5):
            writer.submit(lambda number=number: written.append(number))
        writer.flush()
        assert written == [0, 1, 2, 3, 4]
        writer.submit(lambda: written.append(5))
    assert written == [0, 1, 2, 3, 4, 5]


def test_a_write_does_not_block_and_few_are_kept_waiting():
    gate, submitted = threading.Event(), []
    with BackgroundWriter() as writer:

        def submit_all():
            for number in range(6):
                writer.submit(gate.wait)
                submitted.append(number)

        thread = threading.Thread(target=submit_all)
        thread.start()
        wait_for(lambda: len(submitted) >= 2)
        thread.join(0.1)  # in which it could submit more, if it might
        assert len(submitted) <= 3
        gate.set()
        thread.join()


@pytest.mark.parametrize("error", [TrainingError("no space"), KeyboardInterrupt()])
def test_after_an_error_nothing_else_is_written_and_it_is_raised(error):
    written = []

    def fail():
        raise error

    def write():
        with BackgroundWriter() as writer:
            writer.submit(fail)
            writer.submit(lambda: written.append(1))
            writer.flush()

    with pytest.raises(type(error)) as raised:
        write()
    assert raised.value is error
    assert written == []


def test_an_error_of_the_last_write_is_raised_at_the_end_but_hides_no_other():
    def fail():
        raise TrainingError("no space")

    def run(after):
        with BackgroundWriter() as writer:
            writer.submit(fail)
            after()

    with pytest.raises(TrainingError):
        run(lambda: None)
    with pytest.raises(ZeroDivisionError):
        run(lambda: 1 / 0)

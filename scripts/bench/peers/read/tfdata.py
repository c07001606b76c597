"""tf.data over TFRecord: raw pixels in tf.train.Example, shards interleaved, everything AUTOTUNE, order not held."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

from scripts.bench.peers.reading import BATCH, SIZE, Batches, load, run

_SHARDS = 8
_FEATURES = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}


def write(data: Path, folder: Path) -> None:
    writers = [tf.io.TFRecordWriter(str(folder / f"{shard:05d}.tfrec")) for shard in range(_SHARDS)]
    for at, (image, label) in enumerate(zip(*load(data), strict=True)):
        feature = {
            "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image.tobytes()])),
            "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[int(label)])),
        }
        example = tf.train.Example(features=tf.train.Features(feature=feature))
        writers[at % _SHARDS].write(example.SerializeToString())
    for writer in writers:
        writer.close()


def _parse_one(record: Any) -> tuple[Any, Any]:
    fields = tf.io.parse_single_example(record, _FEATURES)
    return tf.reshape(tf.io.decode_raw(fields["image"], tf.uint8), (SIZE, SIZE, 3)), fields["label"]


def _parse_batch(records: Any) -> tuple[Any, Any]:
    fields = tf.io.parse_example(records, _FEATURES)
    return tf.reshape(tf.io.decode_raw(fields["image"], tf.uint8), (BATCH, SIZE, SIZE, 3)), fields["label"]


def batches(_data: Path, folder: Path, parse: str) -> Batches:
    shards = tf.data.Dataset.from_tensor_slices(sorted(map(str, folder.glob("*.tfrec"))))
    records = (
        shards.shuffle(_SHARDS)
        .interleave(tf.data.TFRecordDataset, num_parallel_calls=tf.data.AUTOTUNE, deterministic=False)
        .repeat()
        .shuffle(1000)
    )
    options = {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": False}
    if parse == "batches":
        dataset = records.batch(BATCH, drop_remainder=True).map(_parse_batch, **options)
    else:
        dataset = records.map(_parse_one, **options).batch(BATCH, drop_remainder=True, **options)
    return iter(dataset.prefetch(tf.data.AUTOTUNE))


if __name__ == "__main__":
    run(batches, write)

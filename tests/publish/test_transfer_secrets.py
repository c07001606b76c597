"""Passwords and tokens of URLs stay in the URLs: no output, error, log or chained exception shows them."""

from __future__ import annotations

import json
import traceback
from pathlib import Path

import fsspec
import pytest

from tpucache import CachedDataset, Manifest, StoreError, TpucacheError, verify_cache
from tpucache.adopt.kept import list_folders
from tpucache.cli import main
from tpucache.errors import redact
from tpucache.publish.transfer import fetch_cache, push_cache
from tpucache.store.remote.cache import list_kept
from tpucache.text import url_secrets

SECRETS = ("pa55word", "t0ken")


def with_secrets(url):
    return url.replace("://", "://ann:pa55word@") + "?token=t0ken&x=1"


def everything_of(error):
    """All that a traceback, or a tool that follows an exception's causes, would show."""
    seen = []
    while error is not None:
        seen += [repr(error), str(error), *traceback.format_exception(error)[-1:]]
        error = error.__cause__ or error.__context__
    return "\n".join(seen)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://ann:secret@example.org/cache", "https://example.org/cache"),
        ("https://secret@example.org/cache", "https://example.org/cache"),
        ("s3://key:sec/ret@bucket/x", "s3://bucket/x"),
        ("s3://key:sec@ret@bucket/x", "s3://bucket/x"),
        ("https:/ann:secret@example.org", "https:/example.org"),
        ("GET https://h/x?token=secret: no", "GET https://h/x?*** no"),
        ("URL('https://a:b@h/x?sig=secret') failed", "URL('https://h/x?***') failed"),
        ("https://h/x#access_token=secret", "https://h/x?***"),
        ("zip://x::https://a:secret@h/x.zip", "zip://x::https://h/x.zip"),
        ("https://h:8080/a@b gs://b/a@b user@host ann:b@c what? a/b?c", None),
    ],
)
def test_urls_are_shown_without_secrets_and_all_else_as_it_is(text, shown):
    assert redact(text) == (text if shown is None else shown)


def test_secrets_are_found_however_they_are_spelled():
    url = "s3://key:a%2Fb%40c@bucket/x?token=d%2Be"
    assert redact("a/b@c and a%2Fb%40c and d+e and d%2Be", url_secrets(url)) == "*** and *** and *** and ***"
    assert url_secrets("gs://bucket/x") == []


@pytest.mark.parametrize("status", [0, 403, 404, 503])
def test_nothing_that_goes_wrong_on_the_way_tells_a_secret(served, tmp_path, caplog, status):
    served.status = status
    if not status:
        (served.folder / "v01-00000.lmdb").unlink()
    with pytest.raises(StoreError) as caught:
        fetch_cache(with_secrets(served.url), tmp_path / "fetched")
    shown = everything_of(caught.value) + caplog.text
    assert "served" in str(caught.value)
    assert not any(secret in shown for secret in SECRETS)


class Telltale(fsspec.AbstractFileSystem):
    """A store whose errors say all that they know, in several spellings."""

    protocol = "telltale"
    refuse_at_once = False
    url = "telltale://ann:pa55word@host/x?token=t0ken"

    def __init__(self, **options):
        super().__init__(**options)
        if self.refuse_at_once:
            raise RuntimeError(f"login ann:pa55word refused at {self.url}")

    def _open(self, path, mode="rb", **options):
        raise PermissionError(f"{self.url}: ann / pa55word, token t0ken")

    def ls(self, path, detail=True, **options):
        raise PermissionError(f"{path}: ann / pa55word")


@pytest.mark.parametrize("at_once", [True, False])
def test_errors_of_a_stores_library_lose_its_secrets(cache, tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(Telltale, "refuse_at_once", at_once)
    fsspec.register_implementation("telltale", Telltale, clobber=True)
    Telltale.clear_instance_cache()
    for call in (lambda: fetch_cache(Telltale.url, tmp_path / "out"), lambda: push_cache(cache, Telltale.url)):
        with pytest.raises(TpucacheError) as caught:
            call()
        assert not any(secret in everything_of(caught.value) for secret in SECRETS)
        assert "***" in str(caught.value)


@pytest.mark.slow
def test_commands_print_no_secret(cache, served, tmp_path, capsys):
    url = with_secrets(served.url)
    assert main(["fetch", url, str(tmp_path / "fetched"), "--json"]) == 0
    for options in ([], ["--json"]):
        assert main(["push", str(cache), with_secrets("memory://secrets/x"), *options]) == 0
    fsspec.filesystem("memory").store.clear()
    out, err = capsys.readouterr()
    assert json.loads(out[out.rindex("{") :])["place"] == "memory://secrets/x"
    assert main(["inspect", url, "--cache-dir", str(tmp_path / "kept")]) == 0
    for words in (["push", url, str(tmp_path / "out")], ["verify", url]):
        assert main(words) != 0
    with pytest.raises(SystemExit):
        main(["fetch", url])
    shown = "".join(capsys.readouterr()) + out + err
    assert not any(secret in shown for secret in SECRETS)


def test_wrong_usage_prints_no_secret(capsys):
    for words in (
        ["doctor", "https://ann:pa55word@h/x?t0ken"],
        ["warmup", "a", "b", "--target", "https://a:pa55word@h"],
    ):
        with pytest.raises(SystemExit):
            main(words)
    shown = "".join(capsys.readouterr())
    assert "h/x" in shown
    assert not any(secret in shown for secret in SECRETS)


def test_a_token_in_a_url_goes_with_each_file(served, cache, tmp_path):
    fetch_cache(f"{served.url}/?token=t0ken", tmp_path / "fetched")
    assert {path.name for path in (tmp_path / "fetched").iterdir()} == {path.name for path in cache.iterdir()}
    assert all(path.endswith("?token=t0ken") for path, _ in served.requests)


FOLDER_WANTED = [
    Manifest.load, verify_cache, lambda url: push_cache(url, "memory://x"),
    lambda url: CachedDataset("memory://x", cache_dir=url), list_kept, list_folders,
]  # fmt: skip


@pytest.mark.parametrize("read", FOLDER_WANTED)
@pytest.mark.parametrize("kind", [str, Path])
def test_a_url_where_a_folder_belongs_is_one_clear_line_without_its_secrets(read, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TpucacheError, match=r"s3://bucket/cache is a URL|s3:// URL") as caught:
        read(kind("s3://ann:pa55word@bucket/cache?token=t0ken"))
    assert not [*tmp_path.iterdir()]
    assert not any(secret in everything_of(caught.value) for secret in SECRETS)
    assert "\n" not in str(caught.value)

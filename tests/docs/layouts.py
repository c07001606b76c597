"""Small generated data in the layouts that docs/sources.md names, written by the libraries that people use."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import tfrecord
import webdataset
from PIL import Image
from pyarrow import parquet

LABELS = ("ETT - Abnormal", "ETT - Normal", "CVC - Abnormal")
COUNT = 6
MODULES = {
    "imdb": "def train():\n    return [([1] * (100 * n + 50), n % 2) for n in range(6)]\n",
    "bert": (
        "def train():\n"
        "    return [{'ids': [1, 2], 'mask': [1, 0], 'token_type_ids': [0, 0], 'targets': n % 2} for n in range(6)]\n"
    ),
}


def image(number: int, kind: str = "JPEG") -> bytes:
    target = io.BytesIO()
    Image.new("RGB", (12, 10), (number * 30, 60, 90)).save(target, kind)
    return target.getvalue()


def _files(folder: Path, suffix: str = ".jpg") -> None:
    folder.mkdir(parents=True)
    for number in range(COUNT):
        (folder / f"{number}{suffix}").write_bytes(image(number, "JPEG" if suffix == ".jpg" else "PNG"))


def _records(path: Path, examples: list[dict[str, tuple[Any, str]]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = tfrecord.TFRecordWriter(str(path))
    for example in examples:
        writer.write(example)
    writer.close()


def _table(path: Path, header: str, row: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *(row(number) for number in range(COUNT))]) + "\n")


def write_layouts(root: Path) -> None:
    """Write all of them below a folder."""
    numbers = range(COUNT)
    _records(
        root / "flowers/tfrecords-jpeg-224x224/train/00-224x224-6.tfrec",
        [{"image": (image(n), "byte"), "class": (n, "int"), "id": (b"%d" % n, "byte")} for n in numbers],
    )
    _records(
        root / "ranzcr/train_tfrecords/00-6.tfrec",
        [
            {"image": (image(n), "byte"), "StudyInstanceUID": (b"%d" % n, "byte"), "PatientID": (b"p", "byte")}
            | dict.fromkeys(LABELS, (n % 2, "int"))
            for n in numbers
        ],
    )
    _files(root / "ranzcr/train")
    _table(root / "ranzcr/train.csv", ",".join(("StudyInstanceUID", *LABELS)), lambda n: f"{n},{n % 2},1,0")
    _files(root / "siim/train", ".png")
    _table(root / "siim/train-rle.csv", "ImageId, EncodedPixels", lambda n: f"{n}, {'3 4 6 5' if n % 2 else '-1'}")
    _files(root / "pawpularity/train")
    _table(root / "pawpularity/train.csv", "Id,Eyes,Pawpularity", lambda n: f"{n},1,{20 + n}")
    for name in ("n01440764", "n01443537"):
        _files(root / "imagenet/train" / name)
    with zipfile.ZipFile(root / "imagenet.zip", "w") as archive:
        for path in sorted((root / "imagenet").rglob("*.jpg")):
            archive.write(path, path.relative_to(root / "imagenet"))
    with webdataset.TarWriter(str(root / "imagenet/train-000000.tar")) as shard:
        for n in numbers:
            shard.write({"__key__": f"{n:06d}", "jpg": image(n), "cls": n})
    for part in range(2):
        _records(
            root / f"imagenet/train-0000{part}-of-00002",
            [
                {
                    "image/encoded": (image(n), "byte"),
                    "image/class/label": (n, "int"),
                    "image/class/text": (b"tench", "byte"),
                    "image/object/bbox/xmin": ([0.1], "float"),
                }
                for n in numbers
            ],
        )
    _files(root / "coco/train2017")
    annotations = root / "coco/annotations/instances_train2017.json"
    annotations.parent.mkdir()
    content = {
        "images": [{"id": n, "file_name": f"{n}.jpg", "width": 12, "height": 10} for n in numbers],
        "categories": [{"id": 7, "name": "cat"}],
        "annotations": [
            {"id": n, "image_id": n, "category_id": 7, "bbox": [1, 2, 5, 6], "iscrowd": 0} for n in numbers
        ],
    }
    annotations.write_text(json.dumps(content))
    features = {"label": {"_type": "ClassLabel", "names": ["healthy", "rust"]}}
    table = pa.table(
        {"image": [{"bytes": image(n), "path": f"{n}.jpg"} for n in numbers], "label": [n % 2 for n in numbers]}
    )
    (root / "beans/data").mkdir(parents=True)
    parquet.write_table(
        table.replace_schema_metadata({b"huggingface": json.dumps({"info": {"features": features}}).encode()}),
        root / "beans/data/train-00000-of-00001.parquet",
    )
    for name, text in MODULES.items():
        (root / f"{name}.py").write_text(text)


#: What each command makes: samples, names of classes or the kind of labels, and the fields of a record.
EXPECTED: dict[str, tuple[int, Any, list[str]]] = {
    "flowers": (6, [str(n) for n in range(6)], ["image"]),
    "ranzcr": (6, list(LABELS), ["image"]),
    "ranzcr-csv": (6, list(LABELS), ["image"]),
    "siim": (6, "none", ["image", "mask"]),
    "paws": (6, "numbers", ["image"]),
    "imagenet": (12, ["n01440764", "n01443537"], ["image"]),
    "imagenet-zip": (12, ["n01440764", "n01443537"], ["image"]),
    "imagenet-tar": (6, [str(n) for n in range(6)], ["image"]),
    "imagenet-tf": (12, [str(n) for n in range(6)], ["image"]),
    "coco": (6, ["cat"], ["image", "boxes"]),
    "beans": (6, ["healthy", "rust"], ["image"]),
    "imdb": (6, ["0", "1"], ["input_ids", "attention_mask"]),
    "bert": (6, ["0", "1"], ["ids", "mask", "token_type_ids"]),
}

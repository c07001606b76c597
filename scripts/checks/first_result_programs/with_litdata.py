"""LitData: presized JPEGs in chunks, decoded again in every epoch."""

from pathlib import Path

import litdata
from PIL import Image, ImageOps
from torchvision.transforms.v2.functional import pil_to_tensor

PATHS = sorted(Path("photos").glob("*/*"))
CLASSES = sorted({path.parent.name for path in PATHS})


def sample(path):
    return {
        "image": ImageOps.fit(Image.open(path).convert("RGB"), (224, 224)),
        "label": CLASSES.index(path.parent.name),
    }


class Photographs(litdata.StreamingDataset):
    def __getitem__(self, index):
        row = super().__getitem__(index)
        image = row["image"]
        return (image if hasattr(image, "shape") else pil_to_tensor(image)), row["label"]


if __name__ == "__main__":
    litdata.optimize(sample, PATHS, output_dir="optimized", chunk_bytes="64MB", num_workers=2)
    photographs = Photographs("optimized", shuffle=True)
    for images, labels in litdata.StreamingDataLoader(photographs, batch_size=256, num_workers=2):
        print(images.shape, labels.shape, flush=True)

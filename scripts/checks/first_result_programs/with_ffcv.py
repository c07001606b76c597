"""FFCV: presized JPEGs in one file, decoded again in every epoch."""

from pathlib import Path

from ffcv.fields import IntField, RGBImageField
from ffcv.fields.decoders import IntDecoder, SimpleRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import ToTensor, ToTorchImage
from ffcv.writer import DatasetWriter
from PIL import Image, ImageOps


class Photographs:
    def __init__(self):
        self.paths = sorted(Path("photos").glob("*/*"))
        self.classes = sorted({path.parent.name for path in self.paths})

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        path = self.paths[index]
        return ImageOps.fit(Image.open(path).convert("RGB"), (224, 224)), self.classes.index(path.parent.name)


if __name__ == "__main__":
    fields = {"image": RGBImageField(write_mode="jpg"), "label": IntField()}
    DatasetWriter("photos.beton", fields, num_workers=2).from_indexed_dataset(Photographs())
    pipelines = {
        "image": [SimpleRGBImageDecoder(), ToTensor(), ToTorchImage()],
        "label": [IntDecoder(), ToTensor()],
    }
    loader = Loader("photos.beton", 256, num_workers=2, order=OrderOption.RANDOM, pipelines=pipelines)
    for images, labels in loader:
        print(images.shape, labels.shape, flush=True)

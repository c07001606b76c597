"""MosaicML Streaming: presized JPEGs in shards, decoded again in every epoch."""

from pathlib import Path

from PIL import Image, ImageOps
from streaming import MDSWriter, StreamingDataset
from torch.utils.data import DataLoader
from torchvision.transforms.v2.functional import pil_to_tensor

paths = sorted(Path("photos").glob("*/*"))
classes = sorted({path.parent.name for path in paths})
with MDSWriter(out="mds", columns={"image": "jpeg", "label": "int"}) as writer:
    for path in paths:
        image = ImageOps.fit(Image.open(path).convert("RGB"), (224, 224))
        writer.write({"image": image, "label": classes.index(path.parent.name)})


class Photographs(StreamingDataset):
    def __getitem__(self, index):
        row = super().__getitem__(index)
        return pil_to_tensor(row["image"]), row["label"]


for images, labels in DataLoader(Photographs(local="mds", shuffle=True, batch_size=256), 256, num_workers=2):
    print(images.shape, labels.shape, flush=True)

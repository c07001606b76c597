"""WebDataset: presized JPEGs in shards, decoded again in every epoch."""

import io
from pathlib import Path

import torch
import webdataset
from PIL import Image, ImageOps
from torchvision.transforms.v2.functional import pil_to_tensor

paths = sorted(Path("photos").glob("*/*"))
classes = sorted({path.parent.name for path in paths})
Path("shards").mkdir()
with webdataset.ShardWriter("shards/%05d.tar", maxcount=1000) as writer:
    for number, path in enumerate(paths):
        data = io.BytesIO()
        ImageOps.fit(Image.open(path).convert("RGB"), (224, 224)).save(data, "JPEG", quality=95)
        writer.write({"__key__": f"{number:06d}", "jpg": data.getvalue(), "cls": classes.index(path.parent.name)})

shards = sorted(map(str, Path("shards").glob("*.tar")))
dataset = (
    webdataset.WebDataset(shards, shardshuffle=len(shards))
    .shuffle(5000)
    .decode("pil")
    .to_tuple("jpg", "cls")
    .map_tuple(pil_to_tensor)
)
for images, labels in torch.utils.data.DataLoader(dataset, 256, num_workers=2):
    print(images.shape, labels.shape, flush=True)

"""Hugging Face datasets: images are decoded again in every epoch."""

from datasets import load_dataset
from PIL import ImageOps
from torch.utils.data import DataLoader
from torchvision.transforms.v2.functional import pil_to_tensor

data = load_dataset("imagefolder", data_dir="photos", split="train")


def transform(rows):
    images = [ImageOps.fit(image.convert("RGB"), (224, 224)) for image in rows["image"]]
    return {"image": [pil_to_tensor(image) for image in images], "label": rows["label"]}


loader = DataLoader(data.with_transform(transform), 256, shuffle=True, num_workers=2)
for batch in loader:
    print(batch["image"].shape, batch["label"].shape, flush=True)

"""torchvision: every photograph is decoded again in every epoch."""

from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

transform = v2.Compose([v2.Resize(224), v2.CenterCrop(224), v2.PILToTensor()])
loader = DataLoader(ImageFolder("photos", transform), 256, shuffle=True, num_workers=2)
for images, labels in loader:
    print(images.shape, labels.shape, flush=True)

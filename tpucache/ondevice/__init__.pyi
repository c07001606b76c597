"""The public names of the package; its `__init__.py` reads them here, and imports each when it is first used."""

from tpucache.ondevice.draws import draw as draw
from tpucache.ondevice.modules import Augment as Augment, Normalise as Normalise, decoder as decoder
from tpucache.ondevice.resident import Resident as Resident
from tpucache.ondevice.settings import AugmentSettings as AugmentSettings

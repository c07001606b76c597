"""The public names of the package; its `__init__.py` reads them here, and imports each when it is first used."""

from tpucache.insight.copies import (
    Comparison as Comparison,
    Exact as Exact,
    Leak as Leak,
    Pairs as Pairs,
    compare as compare,
    confirm_copies as confirm_copies,
    exact_copies as exact_copies,
    find_leak as find_leak,
    findings as findings,
    groups as groups,
    pairs as pairs,
)
from tpucache.insight.hashing import hashes as hashes
from tpucache.insight.labels import (
    Predictions as Predictions,
    Suspects as Suspects,
    read_predictions as read_predictions,
    suspects as suspects,
)
from tpucache.insight.splitting import folds as folds
from tpucache.store.facts import Findings as Findings
from tpucache.store.hashes import Hashes as Hashes

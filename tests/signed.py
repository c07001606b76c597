from __future__ import annotations

import hashlib
import json
from typing import Any


def signed(content: dict[str, Any] | str) -> str:
    """Return the text of a manifest's file with this content and its digest."""
    content = {**(json.loads(content) if isinstance(content, str) else content)}
    content.pop("digest", None)
    text = json.dumps(content, indent=1, sort_keys=True) + "\n"
    content["digest"] = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps(content, indent=1, sort_keys=True) + "\n"

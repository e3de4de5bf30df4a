"""Chat templates in the shape of ten model families, with `{% generation %}` blocks around what the
assistant writes.

QWEN3 is the template that Qwen3 models are published with, which has none.
"""

from __future__ import annotations

import re
from pathlib import Path

FILES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted(Path(__file__).parent.glob("*.jinja"))
}
QWEN3 = FILES["qwen3"]
MARKED = {name: template for name, template in FILES.items() if name != "qwen3"}


def plain(template: str) -> str:
    """The template without its generation blocks, as most models are published."""
    opened = re.sub(r"\{%(-?)\s*generation\s*(-?)%\}", r"{%\1 if true \2%}", template)
    return re.sub(r"\{%(-?)\s*endgeneration\s*(-?)%\}", r"{%\1 endif \2%}", opened)

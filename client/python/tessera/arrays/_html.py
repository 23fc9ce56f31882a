"""The HTML that a notebook shows for an array: its properties, and a drawing of its proportions.
Reads no data."""

import datetime
import html
from typing import Any

from ..graph import _dtypes


def _bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


_LINE = 16  # Height in pixels of a device's name.


def _drawing(shape: Any, shards: Any) -> str:
    """Draws a rectangle, or one rectangle per shard, stacked in the order of the shards."""
    if not shape or 0 in shape:
        return ""
    rows, columns = (1, shape[0]) if len(shape) == 1 else shape[-2:]
    # The ratio of the sides is the fourth root of the array's ratio, to keep long arrays visible.
    ratio = max(min((columns / rows) ** 0.25, 4.0), 0.25)
    width, height = (100.0, 100.0 / ratio) if ratio > 1 else (100.0 * ratio, 100.0)
    if shards:
        width, height = max(width, 60.0), max(height, 2.0 * _LINE * len(shards))
    # Each rectangle has space for its name. The remaining height is shared out in proportion to the
    # shards' sizes in bytes.
    total, free = sum(s.end - s.begin for s in shards), height - _LINE * len(shards)
    parts = [(_LINE + free * (s.end - s.begin) / total, s.device) for s in shards]
    top, drawn = 1.0, ""
    for part, device in parts or [(height, "")]:
        drawn += (
            f'<rect x="1" y="{top:.0f}" width="{width:.0f}" height="{part:.0f}" fill="#d5e8d4"'
            ' stroke="#5a8a58"/>'
        )
        if device:
            drawn += f'<text x="6" y="{top + 12:.0f}" font-size="11">{html.escape(device)}</text>'
        top += part
    return f'<svg width="{width + 2:.0f}" height="{height + 2:.0f}">{drawn}</svg>'


def card(array: Any) -> str:
    buffer = getattr(array._source, "buffer", None)
    rows = [
        ("shape", " x ".join(map(str, array.shape)) or "number"),
        ("dtype", _dtypes.argument_of(array.dtype)),
        ("bytes", _bytes(array.nbytes)),
    ]
    if buffer is None:
        title = "tessera.Expr"
    else:
        title = "tessera.Array"
        devices = array.devices
        title_of_them = "device" if len(devices) == 1 else "devices"
        rows = [("name", buffer.name), *rows, (title_of_them, ", ".join(devices))]
        if buffer.HasField("expire_time"):
            seconds = buffer.expire_time.seconds
            when = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
            rows.append(("expires", f"{when:%Y-%m-%d %H:%M:%S} UTC"))
    # Views are drawn without shards, because their elements may be on any shard.
    shards = buffer.shards if buffer is not None and array._view == array._source.whole else ()
    cells = "".join(
        f"<tr><th>{html.escape(key)}</th><td>{html.escape(value)}</td></tr>" for key, value in rows
    )
    return (
        f"<table><tr><td><table><caption>{title}</caption>{cells}</table></td>"
        f"<td>{_drawing(array.shape, shards)}</td></tr></table>"
    )

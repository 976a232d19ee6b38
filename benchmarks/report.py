"""How figures are printed."""

import math
from collections.abc import Mapping, Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


WIDTH, HEIGHT, MARGIN = 640, 320, 60
COLORS = ("#1b6ca8", "#c0392b", "#2e8b57", "#8e44ad", "#d68910", "#555555")


def curves(
    title: str, lines: Mapping[str, Sequence[tuple[float, float]]], limit: float
) -> str:
    """Return an SVG image of (x, y) points joined to lines, x on a logarithmic scale.

    `limit` is a value of y that is drawn across, and the end of the axis.
    """
    xs = [math.log10(x) for points in lines.values() for x, _ in points]
    first, span = min(xs), max(max(xs) - min(xs), 1e-9)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - first) / span
        right = MARGIN + across * (WIDTH - 2 * MARGIN)
        return right, HEIGHT - MARGIN - y / limit * (HEIGHT - 2 * MARGIN)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{MARGIN}" y="24">{title}</text>',
    ]
    for y in (0, limit):
        _, height = place(10**first, y)
        parts.append(
            f'<path d="M{MARGIN} {height:.1f}H{WIDTH - MARGIN}" stroke="#bbbbbb"/>'
            f'<text x="10" y="{height + 4:.1f}">{y:g}</text>'
        )
    for x in sorted({x for points in lines.values() for x, _ in points}):
        right, down = place(x, 0)
        parts.append(
            f'<text x="{right:.1f}" y="{down + 18:.1f}" text-anchor="middle">{x:,.0f}</text>'
        )
    for number, (name, points) in enumerate(lines.items()):
        color = COLORS[number % len(COLORS)]
        path = " L".join("{:.1f} {:.1f}".format(*place(*point)) for point in points)
        down = MARGIN + 16 * number
        parts.append(
            f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"/>'
            f'<text x="{MARGIN + 10}" y="{down}" fill="{color}">{name}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"

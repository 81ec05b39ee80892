"""Draws the curves of the stories in examples/ from the tables of the pages: docs/sums.svg, shorter.svg and judged.svg.

`python docs/draw_curves.py` writes them; a test compares.
"""

import re
from math import ceil, floor
from pathlib import Path

DOCS = Path(__file__).parent
WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM, TOP = 640, 260, 44, 12, 34, 14
COLOURS = ("#2563eb", "#d97706")
STEPS_EACH = 10
"""Of a column of the table of docs/grpo.md, which has means."""
Curve = tuple[str, list[tuple[float, float]]]
"""Name, and (step, value) of each point."""


def read_means(text: str) -> list[Curve]:
    """Return the curve of each engine in docs/grpo.md; a mean stands in the middle of its steps."""
    rows = re.findall(r"^\| ((?:local|vLLM)[^|]*) \| \d+ \|((?: ?[\d.]* \|)+)", text, re.MULTILINE)
    return [
        (
            name.partition(" (")[0],
            [(STEPS_EACH * (n + 0.5), float(mean)) for n, mean in enumerate(re.findall(r"0\.\d+", cells))],
        )
        for name, cells in rows
    ]


def read_steps(text: str, *names: str) -> list[Curve]:
    """Return the rows of these names in the tables whose first row has the steps."""
    curves = []
    for table in re.findall(r"^\| step \|.*\n(?:\|.*\n)+", text, re.MULTILINE):
        (_, *steps), _, *rows = map(_cells, table.splitlines())
        for name, *values in rows:
            if name in names:
                points = [(float(step), float(value)) for step, value in zip(steps, values, strict=True) if value]
                curves.append((name.replace("`", ""), points))
    return curves


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def draw(curves: list[Curve], *, first_step: int = 0, step_between: int = 1, line_between: float = 0.2) -> str:
    """Return the picture: values upwards, steps to the right. `line_between`: values between two lines across."""
    last = ceil(max(step for _, points in curves for step, _ in points) / step_between) * step_between
    values = [value for _, points in curves for _, value in points]
    lines = range(floor(min(0.0, *values) / line_between), ceil(max(values) / line_between - 1e-9) + 1)
    lowest, highest = lines[0] * line_between, lines[-1] * line_between

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - first_step) / (last - first_step)

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (highest - value) / (highest - lowest)

    style = 'font-family="sans-serif" font-size="12"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {style}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for line in lines:
        value = line * line_between
        parts.append(f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end" fill="#57534e">{value:.1f}</text>')
    for step in range(first_step, last + 1, step_between):
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - 16}" text-anchor="middle" fill="#57534e">{step}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 2}" text-anchor="middle" fill="#57534e">step</text>')
    for line, (name, points) in enumerate(curves):
        colour = COLOURS[line]
        places = [(f"{x(step):.1f}", f"{y(value):.1f}") for step, value in points]
        path = " ".join(",".join(place) for place in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{across}" cy="{down}" r="3" fill="{colour}"/>' for across, down in places]
        parts.append(f'<text x="{LEFT + 12}" y="{TOP + 14 + 16 * line}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def pictures() -> dict[str, str]:
    """Return each picture by the name of its file."""
    grpo, preferences = ((DOCS / page).read_text("utf-8") for page in ("grpo.md", "preferences.md"))
    margins = read_steps(preferences, "`rewards/margins`", "`eval_rewards/margins`, of pairs held out")
    return {
        "sums.svg": draw(read_means(grpo), step_between=20),
        "shorter.svg": draw(margins, first_step=1, line_between=0.5),
        "judged.svg": draw(read_steps(preferences, "reward"), first_step=1, line_between=0.5),
    }


if __name__ == "__main__":
    for name, picture in pictures().items():
        (DOCS / name).write_text(picture, "utf-8")

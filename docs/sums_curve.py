"""Draws docs/sums.svg, the rewards of `python examples/sums.py`, from the table in docs/grpo.md.

`python docs/sums_curve.py` writes it; a test compares.
"""

import re
from pathlib import Path

DOCS = Path(__file__).parent
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 260, 44, 34, 14
COLOURS = ("#2563eb", "#d97706")
STEPS_EACH = 10
"""Of a column of the table."""


def read_table(text: str) -> list[tuple[str, list[float]]]:
    """(engine, mean reward of every ten steps) of each row."""
    rows = re.findall(r"^\| ((?:local|vLLM)[^|]*) \| \d+ \|((?: ?[\d.]* \|)+)", text, re.MULTILINE)
    return [(name.partition(" (")[0], [float(one) for one in re.findall(r"0\.\d+", cells)]) for name, cells in rows]


def draw(curves: list[tuple[str, list[float]]]) -> str:
    """The picture: reward upwards, steps to the right."""
    most = max(len(rewards) for _, rewards in curves)

    def x(number: float) -> float:
        return LEFT + (WIDTH - LEFT - 12) * number / most

    def y(reward: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - reward)

    style = 'font-family="sans-serif" font-size="12"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {style}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for tenth in range(0, 11, 2):
        at = y(tenth / 10)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - 12}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end" fill="#57534e">{tenth / 10:.1f}</text>')
    for number in range(0, most + 1, 2):
        step = number * STEPS_EACH
        parts.append(f'<text x="{x(number):.1f}" y="{HEIGHT - 16}" text-anchor="middle" fill="#57534e">{step}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 2}" text-anchor="middle" fill="#57534e">step</text>')
    for (name, rewards), colour, line in zip(curves, COLOURS, range(2), strict=False):
        points = " ".join(f"{x(number + 0.5):.1f},{y(reward):.1f}" for number, reward in enumerate(rewards))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{p.split(",")[0]}" cy="{p.split(",")[1]}" r="3" fill="{colour}"/>' for p in points.split()
        ]
        parts.append(f'<text x="{LEFT + 12}" y="{TOP + 14 + 16 * line}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    (DOCS / "sums.svg").write_text(draw(read_table((DOCS / "grpo.md").read_text("utf-8"))), "utf-8")

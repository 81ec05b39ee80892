"""The charts of a run's page, as Vega-Lite specifications (https://vega.github.io/vega-lite/docs/)."""

from typing import Any

from surefoot.diagnostics.report.run_history import HELD_OUT, PROGRAM, Row, RunHistory

Spec = dict[str, Any]
HEIGHT = 220
HELD_OUT_COLOR = "#e45756"
PHASE_ORDER = [
    "data_wait", "collectives", "forward", "forward_backward", "backward", "optimizer", "evaluate", "save",
    "sync", "rollout", "rollout_wait", "reward", "launch", "load", "tokenize", "export", "steps",
]  # fmt: skip
OPTIONS: Spec = {"width": "container", "height": HEIGHT, "config": {"mark": {"tooltip": True}}}
CURVES = (
    "reward", "length", "entropy", "importance", "kl", "margin", "accuracy", "loss", "eval_loss", "gradient", "rate",
    "speed",
)  # fmt: skip
"""Charts of values over steps, which the page smooths, zooms and draws in a logarithmic scale."""
ZOOM: Spec = {
    "name": "zoom",
    "select": {"type": "interval", "encodings": ["x"], "zoom": "wheel![event.shiftKey]"},
    "bind": "scales",
}
"""Dragging moves, the wheel with Shift zooms, a double click shows all."""
PALETTE = [
    "#4c78a8", "#f58518", "#54a24b", "#72b7b2", "#e45756", "#b279a2", "#ff9da6", "#9d755d", "#eeca3b", "#bab0ac",
    "#6b4c9a", "#2f7d5b", "#d67195", "#439894", "#a05195", "#7f6000", "#79b4e8",
]  # fmt: skip
"""Colours of phases and owners, in their order: the same in every report."""
STEP: Spec = {"field": "step", "type": "quantitative", "axis": {"tickMinStep": 1}, "scale": {"nice": False}}
"""The axis of steps, which are whole also in short runs."""
OWNER_ORDER = ["frozen parameters", "trained parameters", "gradients", "optimizer", "activations", "other", PROGRAM]


def charts(history: RunHistory) -> dict[str, tuple[str, Spec]]:
    """Return name -> (title, specification) of each chart that has data."""
    rollouts, steps, pairs = history.rollouts, history.steps, history.preferences
    drawn = {
        "reward": ("Reward: mean of a step, spread within groups; points: held-out prompts", _draw_reward(history)),
        "length": ("Tokens of a completion", _draw_line(rollouts, "completion_length", "tokens")),
        "entropy": ("Entropy of the policy", _draw_line(rollouts, "entropy", "nats")),
        "importance": ("Trainer's over the engine's probability", _draw_line(rollouts, "importance_ratio", "ratio")),
        "kl": ("Divergence from the reference", _draw_line(rollouts, "kl", "nats")),
        "margin": ("Margin of rewards: the chosen answer's less the rejected one's", _draw_by_data(pairs, "margin")),
        "accuracy": ("Share of pairs with a positive margin", _draw_by_data(pairs, "accuracy")),
        "loss": ("Loss", _draw_loss(history)),
        "gradient": ("Norm of the gradient", _draw_line(steps, "grad_norm", "norm")),
        "rate": ("Learning rate", _draw_line(steps, "learning_rate", "learning rate")),
        "speed": ("Tokens per second", _draw_line(steps, "tokens_per_second", "tokens/s", zero=True)),
        "phases": ("Time of a step by phase, mean of the ranks", _draw_phases(history.phases)),
        "memory": ("Memory of each rank, without files", _draw_memory(history.memory)),
        "ledger": ("Memory by owner", _draw_ledger(history.ledger)),
        "experts": ("Expert load: the busiest expert over the mean", _draw_experts(history.expert_load)),
        "gpus": ("GPUs: busy (line) against power (dashed)", _draw_gpus(history.gpus)),
        "timeline": ("Time line", _draw_timeline(history)),
    }
    for name in CURVES:
        if name in drawn and drawn[name][1]:
            drawn[name][1][0]["params"] = [ZOOM]
    return {name: (title, {"layer": layers, **OPTIONS}) for name, (title, layers) in drawn.items() if layers}


def draw_comparison(rows: list[Row], field: str, names: list[str]) -> Spec:
    """Return the chart of one value of several runs over their steps.

    `rows`: step, the value and `of`, the name of the run; `names`: the runs, which have the same colour in all charts.
    """
    colors = [PALETTE[index % len(PALETTE)] for index in range(len(names))]
    color = _name("of", title=None, scale={"domain": names, "range": colors})
    y = _number(field, title=None, scale={"zero": False})
    (layer,) = _layer(rows, _line(rows), x=STEP, y=y, color=color)
    return {"layer": [{**layer, "params": [ZOOM]}], **OPTIONS}


def _layer(rows: list[Row], mark: Spec, **encoding: Any) -> list[Spec]:
    """Return the layer that draws the rows, in a list; an empty list without rows."""
    return [{"data": {"values": rows}, "mark": mark, "encoding": encoding}] if rows else []


def _line(rows: list[Row], **options: Any) -> Spec:
    """Return the mark of a line, with points if the lines would be too short to be visible."""
    return {"type": "line", "point": len(rows) < 3, **options}


def _points() -> Spec:
    return {"type": "point", "filled": True, "size": 60}


def _number(field: str, **options: Any) -> Spec:
    return {"field": field, "type": "quantitative", **options}


def _name(field: str, **options: Any) -> Spec:
    return {"field": field, "type": "nominal", **options}


def _fixed_colors(field: str, order: list[str], rows: list[Row]) -> Spec:
    """Return the colours of names of an order, each with its own; names that are not in it come last."""
    names = {str(row[field]) for row in rows}
    present = [*(name for name in order if name in names), *sorted(names - set(order))]
    indices = [order.index(name) if name in order else len(order) for name in present]
    colors = [PALETTE[index % len(PALETTE)] for index in indices]
    return _name(field, title=None, sort=present, scale={"domain": present, "range": colors})


def _ordinal(field: str, **options: Any) -> Spec:
    return {"field": field, "type": "ordinal", **options}


def _draw_line(rows: list[Row], name: str, title: str, *, zero: bool = False) -> list[Spec]:
    """Return the line of one value over the steps. `zero`: whether its axis begins at 0."""
    rows = [{"step": row["step"], name: row[name]} for row in rows if row.get(name) is not None]
    y = _number(name, title=title, scale={"zero": zero})
    return _layer(rows, _line(rows), x=STEP, y=y)


def _draw_reward(history: RunHistory) -> list[Spec]:
    if not history.rollouts:
        return []
    rows = [
        {"step": row["step"], "reward": row["reward"], "low": row["reward"] - spread, "high": row["reward"] + spread}
        for row in history.rollouts
        for spread in [row.get("reward_std") or 0.0]
    ]
    held_out = [
        {"step": row["step"], "reward": row["eval_reward"]} for row in history.evaluations if "eval_reward" in row
    ]
    x, y, band = STEP, _number("reward"), {"type": "area", "opacity": 0.2}
    return [
        *_layer(rows, band, x=x, y=_number("low", title="reward"), y2={"field": "high"}),
        *_layer(rows, _line(rows), x=x, y=y),
        *_layer(held_out, {**_points(), "color": HELD_OUT_COLOR}, x=x, y=y),
    ]


def _draw_loss(history: RunHistory) -> list[Spec]:
    trained = [
        {"step": row["step"], "loss": row["loss"], "of": "training"} for row in history.steps if row["loss"] is not None
    ]
    held_out = [
        {"step": row["step"], "loss": row["eval_loss"], "of": HELD_OUT}
        for row in history.evaluations
        if "eval_loss" in row
    ]
    return _draw_by_data([*trained, *held_out], "loss")


def _draw_by_data(rows: list[Row], field: str) -> list[Spec]:
    """Return the line of a value in training, and the points of that of held-out data: `of` tells them apart."""
    trained, held_out = (
        [row for row in rows if field in row and (row["of"] == HELD_OUT) == is_held_out]
        for is_held_out in (False, True)
    )
    encoding = {
        "x": STEP,
        "y": _number(field, scale={"zero": False}),
        "color": _name("of", title=None, sort=["training", HELD_OUT]),
    }
    return [*_layer(trained, _line(trained), **encoding), *_layer(held_out, _points(), **encoding)]


def _draw_phases(rows: list[Row]) -> list[Spec]:
    return _layer(
        rows,
        {"type": "bar"},
        x=_ordinal("step", axis={"labelOverlap": True}),
        y=_number("seconds"),
        color=_fixed_colors("phase", PHASE_ORDER, rows),
    )


def _draw_memory(rows: list[Row]) -> list[Spec]:
    return _layer(rows, _line(rows), x=STEP, y=_number("gib", title="GiB"), color=_name("rank"))


def _draw_ledger(rows: list[Row]) -> list[Spec]:
    return _layer(
        rows,
        {"type": "bar"},
        x=_number("mib", title="MiB"),
        y=_name("rank"),
        color=_fixed_colors("owner", OWNER_ORDER, rows),
    )


def _draw_experts(rows: list[Row]) -> list[Spec]:
    return _layer(
        rows,
        {"type": "rect"},
        x=_ordinal("step", axis={"labelOverlap": True}),
        y=_ordinal("layer"),
        color=_number("load", title="times the mean", scale={"scheme": "orangered", "domainMin": 1}),
    )


def _draw_gpus(rows: list[Row]) -> list[Spec]:
    layers = []
    for name, dash in (("utilisation", {}), ("power", {"strokeDash": [5, 4]})):
        measured = [row for row in rows if row[name] is not None]
        layers += _layer(
            measured,
            _line(measured, **dash),
            x=_number("time_min", title="minutes since the start"),
            y=_number(name, title="share", axis={"format": "%"}, scale={"domain": [0, 1]}),
            color=_name("gpu", title="GPU"),
        )
    return layers


def _draw_timeline(history: RunHistory) -> list[Spec]:
    if not history.events:
        return []
    bars = _layer(
        history.events,
        {"type": "bar", "minBandSize": 4},
        x=_number("began_min", title="minutes since the start"),
        x2={"field": "ended_min"},
        y=_name("rank"),
        color=_fixed_colors("what", PHASE_ORDER, history.events),
    )
    rule = {"type": "rule", "color": "crimson", "strokeWidth": 2}
    tooltip = [_name("code"), _name("title"), _number("time_min")]
    return bars + _layer(history.findings, rule, x=_number("time_min"), tooltip=tooltip)

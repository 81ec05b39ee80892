"""The charts of a run's page, as Vega-Lite specifications."""

from typing import Any

import altair as alt

from surefoot.diagnostics.report.run_history import Row, RunHistory

HEIGHT = 220
HELD_OUT = "#e45756"
PHASE_ORDER = (
    "data_wait", "collectives", "forward", "forward_backward", "backward", "optimizer", "evaluate", "save",
    "sync", "rollout", "rollout_wait", "reward",
)  # fmt: skip


OWNER_ORDER = ("frozen parameters", "trained parameters", "gradients", "optimizer", "activations", "other")


def charts(history: RunHistory) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return name -> (title, specification) of each chart that has data."""
    drawn = {
        "reward": ("Reward: mean of a step, spread within groups; points: held-out prompts", _draw_reward(history)),
        "length": ("Tokens of a completion", _draw_line(history.rollouts, "completion_length", "tokens")),
        "entropy": ("Entropy of the policy", _draw_line(history.rollouts, "entropy", "nats")),
        "importance": (
            "Trainer's over the engine's probability",
            _draw_line(history.rollouts, "importance_ratio", "ratio"),
        ),
        "kl": ("Divergence from the reference", _draw_line(history.rollouts, "kl", "nats")),
        "loss": ("Loss", _draw_loss(history)),
        "rate": ("Learning rate", _draw_line(history.steps, "learning_rate", "learning rate")),
        "speed": ("Tokens per second", _draw_line(history.steps, "tokens_per_second", "tokens/s")),
        "phases": ("Time of a step by phase, mean of the ranks", _draw_phases(history)),
        "memory": ("Memory of each rank, without files", _draw_memory(history)),
        "ledger": ("To whom memory belongs", _draw_ledger(history)),
        "experts": ("Expert load: the busiest expert over the mean", _draw_experts(history)),
        "gpus": ("GPUs: busy (line) against power (dashed)", _draw_gpus(history)),
        "timeline": ("What happened when", _draw_timeline(history)),
    }
    return {name: (title, chart.to_dict()) for name, (title, chart) in drawn.items() if chart is not None}


def _make_data(rows: list[Row]) -> alt.Data:
    return alt.Data(values=rows)  # type: ignore[no-untyped-call]


def _set_size(chart: Any) -> Any:
    return chart.properties(width="container", height=HEIGHT)


def _draw_line(rows: list[Row], name: str, title: str) -> Any:
    rows = [{"step": row["step"], name: row[name]} for row in rows if row.get(name) is not None]
    if not rows:
        return None
    return _set_size(
        alt.Chart(_make_data(rows))
        .mark_line(point=len(rows) < 2)
        .encode(
            x=alt.X("step:Q", title="step"),
            y=alt.Y(f"{name}:Q", title=title, scale=alt.Scale(zero=name == "tokens_per_second")),
            tooltip=["step:Q", f"{name}:Q"],
        )
    )


def _draw_reward(history: RunHistory) -> Any:
    if not history.rollouts:
        return None
    rows = [
        {"step": row["step"], "reward": row["reward"], "low": row["reward"] - spread, "high": row["reward"] + spread}
        for row in history.rollouts
        for spread in [row.get("reward_std") or 0.0]
    ]
    x = alt.X("step:Q", title="step")
    tooltip = ["step:Q", alt.Tooltip("reward:Q", format=".3f")]
    line = alt.Chart(_make_data(rows)).mark_line(point=len(rows) < 2).encode(x=x, y="reward:Q", tooltip=tooltip)
    band = alt.Chart(_make_data(rows)).mark_area(opacity=0.2).encode(x=x, y=alt.Y("low:Q", title="reward"), y2="high:Q")
    held_out = [
        {"step": row["step"], "reward": row["eval_reward"]} for row in history.evaluations if "eval_reward" in row
    ]
    if not held_out:
        return _set_size(alt.layer(band, line))
    points = (
        alt.Chart(_make_data(held_out))
        .mark_point(filled=True, size=60, color=HELD_OUT)
        .encode(x=x, y="reward:Q", tooltip=[alt.Tooltip("reward:Q", format=".3f", title="reward, held out"), "step:Q"])
    )
    return _set_size(alt.layer(band, line, points))


def _draw_loss(history: RunHistory) -> Any:
    rows = [
        {"step": row["step"], "loss": row["loss"], "of": "training"} for row in history.steps if row["loss"] is not None
    ]
    held_out = [
        {"step": row["step"], "loss": row["eval_loss"], "of": "held out"}
        for row in history.evaluations
        if "eval_loss" in row
    ]
    encoding = {
        "x": alt.X("step:Q", title="step"),
        "y": alt.Y("loss:Q", title="loss", scale=alt.Scale(zero=False)),
        "color": alt.Color("of:N", title=None, sort=["training", "held out"]),
        "tooltip": ["of:N", "step:Q", "loss:Q"],
    }
    line = alt.Chart(_make_data(rows)).mark_line(point=len(rows) < 2).encode(**encoding)
    if not held_out:
        return _set_size(line)
    return _set_size(
        alt.layer(line, alt.Chart(_make_data(held_out)).mark_point(filled=True, size=60).encode(**encoding))
    )


def _draw_phases(history: RunHistory) -> Any:
    if not history.phases:
        return None
    return _set_size(
        alt.Chart(_make_data(history.phases))
        .mark_bar()
        .encode(
            x=alt.X("step:O", title="step", axis=alt.Axis(labelOverlap=True)),
            y=alt.Y("seconds:Q", title="seconds"),
            color=alt.Color("phase:N", title=None, sort=list(PHASE_ORDER)),
            tooltip=["step:O", "phase:N", alt.Tooltip("seconds:Q", format=".3f")],
        )
    )


def _draw_memory(history: RunHistory) -> Any:
    if not history.memory:
        return None
    return _set_size(
        alt.Chart(_make_data(history.memory))
        .mark_line(point=len(history.memory) < 3)
        .encode(
            x=alt.X("step:Q", title="step"),
            y=alt.Y("gib:Q", title="GiB"),
            color=alt.Color("rank:N", title="rank"),
            tooltip=["rank:N", "step:Q", alt.Tooltip("gib:Q", format=".2f")],
        )
    )


def _draw_ledger(history: RunHistory) -> Any:
    if not history.ledger:
        return None
    return _set_size(
        alt.Chart(_make_data(history.ledger))
        .mark_bar()
        .encode(
            x=alt.X("mib:Q", title="MiB"),
            y=alt.Y("rank:N", title="rank"),
            color=alt.Color("owner:N", title=None, sort=list(OWNER_ORDER)),
            tooltip=["rank:N", "owner:N", alt.Tooltip("mib:Q", format=".1f")],
        )
    )


def _draw_experts(history: RunHistory) -> Any:
    if not history.expert_load:
        return None
    return _set_size(
        alt.Chart(_make_data(history.expert_load))
        .mark_rect()
        .encode(
            x=alt.X("step:O", title="step", axis=alt.Axis(labelOverlap=True)),
            y=alt.Y("layer:O", title="layer"),
            color=alt.Color("load:Q", title="times the mean", scale=alt.Scale(scheme="orangered", domainMin=1)),
            tooltip=["layer:O", "step:O", "load:Q"],
        )
    )


def _draw_gpus(history: RunHistory) -> Any:
    if not history.gpus:
        return None

    def line(name: str, **mark: Any) -> Any:
        rows = [row for row in history.gpus if row[name] is not None]
        return (
            alt.Chart(_make_data(rows))
            .mark_line(point=len(rows) < 3, **mark)
            .encode(
                x=alt.X("time_min:Q", title="minutes since the start"),
                y=alt.Y(f"{name}:Q", title="share", axis=alt.Axis(format="%"), scale=alt.Scale(domain=[0, 1])),
                color=alt.Color("gpu:N", title="GPU"),
                tooltip=["gpu:N", "time_min:Q", alt.Tooltip(f"{name}:Q", format=".0%")],
            )
        )

    return _set_size(alt.layer(line("utilisation"), line("power", strokeDash=[5, 4])))


def _draw_timeline(history: RunHistory) -> Any:
    if not history.events:
        return None
    bars = (
        alt.Chart(_make_data(history.events))
        .mark_bar(minBandSize=4)
        .encode(
            x=alt.X("began_min:Q", title="minutes since the start"),
            x2="ended_min:Q",
            y=alt.Y("rank:N", title="rank"),
            color=alt.Color("what:N", title=None),
            tooltip=["rank:N", "what:N", "began_min:Q", "ended_min:Q"],
        )
    )
    if not history.findings:
        return _set_size(bars)
    marks = (
        alt.Chart(_make_data(history.findings))
        .mark_rule(color="crimson", strokeWidth=2)
        .encode(x="time_min:Q", tooltip=["code:N", "title:N", "time_min:Q"])
    )
    return _set_size(alt.layer(bars, marks))

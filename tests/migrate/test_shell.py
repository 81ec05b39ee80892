"""Scripts are cut into commands as a shell cuts them, and nothing is run."""

import shlex
import subprocess
import time
from pathlib import Path

import pytest

from surefoot.migrate.shell import UNSET, parse_commands


def words_of(script: str) -> list[list[str]]:
    return [[word.replace(UNSET, "§") for word in command.words] for command in parse_commands(script)]


@pytest.mark.parametrize(
    "script",
    [
        "run --eos_token '<|im_end|>' --use_peft --stop '>' 'a;b' \"c | d\" --out x",
        "run --a 1 > log.txt --b 2 2>&1 && run --c 3",
        "run --system 'it is #1' --name x#1 # a comment, isn't it?\nrun --next",
        "run --a 1 \\\n  --b 2 \\\n\nrun --c 3",
        'A=\'x y\'\nrun $A "$A" \'$A\' \\$A "\\$A" ${A} ${B:-no} ${B:-"no no"} "${B:-no no}"',
        'ARGS=(--a 1 "b c" # comment\n  --d 2)\nARGS+=(--e)\nrun "${ARGS[@]}" --last',
        'MANY="--a 1\n  --b 2"\nrun $MANY "$MANY"',
        "A=(\n --a m # it's (one\n --b 'd # no'\n)\nrun ${A[@]} \"${A[@]}\"",
        'N=2\nrun --steps $(expr 16 / $N) $((16 / $N)) $(expr 3 \\* 5)x "$((7 - 2))"',
        "N=4\nrun $(expr 32 / $N / 2) $((2 + 3 * 4 - 7 / 2)) $(expr 2 - 9) $(( 64 / $N ))",
        "cat <<'END' > file.txt\nrun --not 'this\nEND\nrun --this",
        'run --a <<< "it\'s" --b',
        "f() { run --inside; }\nf",
        "(run --in; run --too) || true",
        'run --text "two\nlines" --quote \'say "hi"\' --back "a\\\\b\\"c"',
        "A=1; A+=2; run $A",
    ],
)
def test_the_words_are_those_of_a_shell(script: str, tmp_path: Path) -> None:
    """bash runs the same script with a `run` that tells what it is given."""
    told = "run() { printf '%s\\0' \"$@\" END; }\n"
    done = subprocess.run(["bash", "-c", told + script], cwd=tmp_path, capture_output=True, text=True, timeout=30)
    outputs = done.stdout.split("END\0")[:-1]
    expected = [output.split("\0")[:-1] for output in outputs]
    redirected = tmp_path / "log.txt"
    if redirected.is_file():  # the first command's
        expected = [redirected.read_text().split("\0")[:-2], *expected]
    assert expected, done.stderr
    assert [words[1:] for words in words_of(script) if words[0] == "run"] == expected


@pytest.mark.parametrize(
    "script",
    [
        "A=1; bash -c 'run --a $A; run --b 2'",
        "export A=1; bash -c 'run --a $A'",
        'A="x y"; bash -lc "run --a $A"',
        "A=2 bash -c 'run --a $A && run'",
        'nohup bash -c "A=\'x y\'; run \\"\\$A\\""',
        "env A=3 /bin/bash -ec 'bash -c \"run $B\"'",
    ],
)
def test_a_shell_that_is_given_a_script_runs_it(script: str) -> None:
    told = "run() { printf '%s\\0' \"$@\" END; }; export -f run\n"
    done = subprocess.run(["bash", "-c", told + script], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    expected = [output.split("\0")[:-1] for output in done.stdout.split("END\0")[:-1]]
    found = [[word for word in words[1:] if not word.startswith("§")] for words in words_of(script)]
    assert found == expected


def test_what_a_script_does_not_say_is_marked() -> None:
    script = "run --lr $LR \"$@\" ${ARGS[@]} --out runs/$(date +%F) --day `date` '$HOME' \\$5"
    (words,) = words_of(script)
    assert words == shlex.split("run --lr §LR '§@' '§{ARGS[@]}' --out 'runs/§(date +%F)' --day '§`date`' '$HOME' '$5'")


def test_variables_of_branches_and_loops_are_uncertain() -> None:
    script = (
        "LR=1e-4\nSIZE=8\nif [ -n \"$DEBUG\" ]; then\n  LR=1\nfi\n[ -z $N ] && N=3\nOPTIONS=\"--lr $LR\"\n"
        "for i in 1 2; do run $i; done\nrun $SIZE $OPTIONS $N\n"
    )  # fmt: skip
    *_, in_loop, last = parse_commands(script)
    assert in_loop.words == ["run", f"{UNSET}i"]
    assert last.words == ["run", "8", "--lr", "1e-4", "3"]
    assert last.uncertain == {"OPTIONS": "--lr 1e-4", "N": "3"}


def test_variables_before_a_command_are_its_own() -> None:
    first, second = parse_commands("export A=1 B\nC=2\nB=3\nD=4 run\nrun\n")
    assert first.environment == {"A": "1", "B": "3", "D": "4"}
    assert second.environment == {"A": "1", "B": "3"}


def test_a_file_that_ends_in_a_backslash_is_read() -> None:
    assert words_of("run --end \\") == [["run", "--end"]]


def test_what_is_set_again_for_sure_is_certain() -> None:
    *_, last = parse_commands("if true; then M=a; fi\nM=b\nrun $M\n")
    assert (last.words, last.uncertain) == (["run", "b"], {})


@pytest.mark.long
def test_large_scripts_are_read_in_their_time_and_doubled_variables_are_refused() -> None:
    script = "echo 'a b' \"c $D\" \\\n  # no\n" * 40_000
    began = time.process_time()
    assert len(list(parse_commands(script + "run --a\n"))) == 40_001
    assert time.process_time() - began < 60  # it was hours
    with pytest.raises(ValueError, match="65536 characters"):
        list(parse_commands("A=1\n" + 'A="$A$A"\n' * 40))


def test_quotes_that_do_not_end_are_an_error() -> None:
    with pytest.raises(ValueError, match="quotation"):
        list(parse_commands("run 'a\n"))


def test_a_command_longer_than_any_is_refused_and_defaults_without_end_are_read() -> None:
    with pytest.raises(ValueError, match="command of more than"):
        list(parse_commands("swift sft --model " + "a" * 300_000))
    assert list(parse_commands("swift sft --model " + "${a:-" * 20_000))

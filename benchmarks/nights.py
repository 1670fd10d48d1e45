"""What one memory saves, what tuning many models together saves, and whether a night survives being killed.

    python benchmarks/nights.py pairs --work FOLDER [--pairs bert_large,roberta_large ...] [--trials-per-subgraph 64]
    python benchmarks/nights.py killed --work FOLDER [--models 50] [--kills 10] [--seed 0]
    python benchmarks/nights.py eight --work FOLDER [--models resnet50,gpt2,...] [--trials-per-subgraph 16]
    python benchmarks/nights.py --table FOLDER

- `pairs`: a model tuned with an empty memory, then one that shares subgraphs with it; how many of the trials that the
  second would have alone it still measures.
- `killed`: small random ONNX files tuned by one command, whose process group gets SIGKILL again and again, at random
  moments from joining the models to the last library. The end is compared with what stood on disk at each kill.
- `eight`: FamilySeer's eight models, each alone with an empty memory, then all of them by one command. Nothing else may
  run on the machine meanwhile.

Each piece is a row in `--out` (default: `benchmarks/nights`) as soon as it is known: a line of WHAT.jsonl, and the
table WHAT.parquet of all lines. A piece that has its row is not run again; so the same command continues. `--code`
names another clone, whose commands are run.
"""

import argparse
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # last: files are read by the code that PYTHONPATH names, if it names any

import pandas as pd
import provenance
import psutil

from lib.contracts import manifest, tables
from lib.contracts.errors import TunerError
from lib.contracts.files import ModelFiles, RoundFiles, RunFiles
from lib.contracts.schemas import CANDIDATES, MEASUREMENTS, REMEMBERED, SUBGRAPHS, TRAINING
from lib.machine import host
from lib.measure import journal
from lib.tuning import history

Row = dict[str, Any]
PAIRS = ("bert_large,roberta_large", "resnet50,resnet152_v2")
EIGHT = "resnet50,resnet152_v2,mobilenet,mobilenetv2,vit_huge,bert_large,roberta_large,gpt2"
_CONFIG = "[tuner]\nartifacts = {artifacts}\n"
_QUICK = """
[plan]
num_trials_per_round = 16
num_trials_warmup = 6
[generate]
population = 32
generations = 1
[measure]
min_repeat_s = 0.001
repeats = 2
[train]
min_samples = 4
num_boost_round = 20
[compile]
finalists = 2
repeats = 1
turns = 1
"""


# Commands, and rows of what came of them.


@dataclass(frozen=True)
class Place:
    """Where commands write, and which clone's they are."""

    folder: Path
    code: Path
    settings: str = ""  # of the configuration, beside the place of artifacts
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def artifacts(self) -> Path:
        return self.folder / "artifacts"

    @contextmanager
    def running(self, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
        """A command in a process group of its own, which is killed when the block ends; the log gets what it says."""
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "tuner.cfg"
        config.write_text(_CONFIG.format(artifacts=self.artifacts) + self.settings)
        surroundings = {**os.environ, **self.environment, "LUIGI_CONFIG_PATH": str(config),
                        "PYTHONPATH": str(self.code)}  # fmt: skip
        with (self.folder / "log").open("ab") as log:
            log.write(f"\n--- {time.strftime('%H:%M:%S')} {' '.join(arguments)}\n".encode())
            log.flush()
            process = subprocess.Popen(
                [sys.executable, "-m", "luigi", "--module", "pipeline", *arguments], cwd=self.code, env=surroundings,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            yield process
        finally:  # also if this script is interrupted
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def run(self, *arguments: str) -> tuple[int, float]:
        """A command to its end: exit status and seconds."""
        started = time.monotonic()
        with self.running(*arguments) as process:
            return process.wait(), time.monotonic() - started

    def tuned(self, model: str, *limit: str) -> tuple[Path, float]:
        """The folder of the run of a model, the only one here, however it is called; and the seconds of its command."""
        status, seconds = self.run("TuneModel", "--model", model, *limit)
        found = next(self.artifacts.glob("*/*/runs/*"), None)
        if status or found is None:
            raise SystemExit(f"{model} was not tuned, status {status}: see {self.folder / 'log'}")
        return found, seconds

    def tracebacks(self) -> int:
        """How many there are in the log."""
        return (self.folder / "log").read_text(errors="replace").count("Traceback (most recent")


class Rows:
    """What is known of one subject: a line of JSON each, and all of them as a table."""

    def __init__(self, what: str, out: Path, code: Path) -> None:
        self._lines, self._table = out / f"{what}.jsonl", out / f"{what}.parquet"
        self._code = code
        out.mkdir(parents=True, exist_ok=True)
        text = self._lines.read_text() if self._lines.exists() else ""
        self.rows: list[Row] = [json.loads(line) for line in text.splitlines()]

    def has(self, **key: Any) -> bool:
        """Whether a piece was done."""
        return any(all(row[name] == value for name, value in key.items()) for row in self.rows)

    def add(self, row: Row) -> None:
        """Keep what came of a piece."""
        command = ["git", "-C", str(self._code), "describe", "--always", "--dirty"]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        row = {**row, **provenance.columns(host.physical_cores(), code)}
        with self._lines.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)
        pd.DataFrame(self.rows).to_parquet(self._table)
        print(json.dumps(row), flush=True)


# What a run left.


def tunable(artifacts: Path, model: str) -> dict[str, int]:
    """Calls of an inference, by subgraph; nothing if the model could not be imported.

    Args:
        model: Its name in the zoo.
    """
    found = next((ModelFiles(folder).subgraphs for folder in artifacts.glob(f"*/{model}")), None)
    if found is None or not found.exists():
        return {}
    rows = tables.read(found, SUBGRAPHS).select(["subgraph_id", "weight", "tunable"]).to_pylist()
    return {row["subgraph_id"]: row["weight"] for row in rows if row["tunable"]}


def past_of(run: Path) -> list[RoundFiles]:
    """What a run recalled, and its finished rounds."""
    files = RunFiles(run)
    return files.trained() if files.recalled.training.exists() else []


def measured(rounds: Sequence[RoundFiles]) -> Counter[str]:
    """How many measurements of each subgraph their tables have."""
    found: Counter[str] = Counter()
    for files in rounds:
        found.update(tables.read(files.measurements, MEASUREMENTS)["subgraph_id"].to_pylist())
    return found


def latencies(artifacts: Path, model: str, past: Sequence[RoundFiles]) -> Row:
    """Of a model's library, of the untuned one beside it, and what its subgraphs sum up to; None if not there."""
    path = next(artifacts.glob(f"*/{model}/runs/*/compiled/manifest.json"), None)
    facts: Row = manifest.read(path) if path else {"latencies_s": {}, "shipped": ""}
    found = {name: median(all_s) * 1e3 for name, all_s in facts["latencies_s"].items() if all_s}
    estimate = history.model_latency_s(history.load(past), tunable(artifacts, model)) if past else math.inf
    return {"tuned_ms": found.get("tuned"), "untuned_ms": found.get("untuned"), "shipped": facts["shipped"],
            "estimate_ms": estimate * 1e3 if estimate < math.inf else None}  # fmt: skip


def seconds(artifacts: Path, past: Sequence[RoundFiles]) -> Row:
    """Where a command's time went, by the clocks of its files; a library that was replaced has left none."""
    of_rounds = [files for files in past if not files.is_recalled]
    manifests = artifacts.glob("*/*/runs/*/compiled/manifest.json")
    return {
        "import_s": _total([(path, SUBGRAPHS) for path in artifacts.glob("*/*/subgraphs.parquet")]),
        "search_s": _total([(files.candidates, CANDIDATES) for files in of_rounds]),
        "measure_s": _total([(files.measurements, MEASUREMENTS) for files in of_rounds]),
        "train_s": _total([(files.training, TRAINING) for files in of_rounds]),
        "compile_s": sum(manifest.read(path)["clock"]["total"] for path in manifests),
    }


def _total(found: Sequence[tuple[Path, Any]]) -> float:
    return sum(tables.stamp(path, schema).clock["total"] for path, schema in found)


# A model after another one.


def pairs(options: argparse.Namespace) -> None:
    """Each pair in an artifacts folder of its own."""
    rows, each = Rows("pairs", options.out, options.code), options.trials_per_subgraph
    for pair in options.pairs:
        first, second = pair.split(",")
        place = Place((options.work / f"pair-{first}-{second}-{each}").resolve(), options.code)
        for model, after in ((first, ""), (second, first)):
            key = {"pair": pair, "model": model, "after": after, "each": each}
            if not rows.has(**key):
                rows.add({**key, **_tuned(place, model, after, each)})


def _tuned(place: Place, model: str, after: str, each: int) -> Row:
    """Tune a model in a place, and give the command once more."""
    if not after:
        shutil.rmtree(place.folder, ignore_errors=True)
    is_continued = any(place.artifacts.glob(f"*/{model}/runs"))  # by who interrupted this script: `wall_s` is a part
    command = ["TuneModel", "--model", model, "--trials-per-subgraph", str(each)]
    status, wall_s = place.run(*command)
    again, second_start_s = place.run(*command)
    own, before = tunable(place.artifacts, model), tunable(place.artifacts, after) if after else {}
    past = past_of(next(place.artifacts.glob(f"*/{model}/runs/*"), place.folder))
    trials, known = measured(past[1:]), measured(past[:1])
    recalled = sum(count for subgraph_id, count in known.items() if subgraph_id in own)
    return {
        "subgraphs": len(own), "new": len(own.keys() - before.keys()), "rounds": len(past) - 1,
        "trials": trials.total(), "alone": each * len(own), "share": trials.total() / max(1, each * len(own)),
        "trials_of_new": sum(count for subgraph_id, count in trials.items() if subgraph_id not in before),
        "recalled": recalled, "samples_of_others": known.total() - recalled,
        **latencies(place.artifacts, model, past), "status": status,
        "wall_s": wall_s, "is_continued": is_continued, "second_status": again, "second_start_s": second_start_s,
        "tracebacks": place.tracebacks(),
    }  # fmt: skip


# Eight models, alone and together.


def eight(options: argparse.Namespace) -> None:
    """Each alone, then all by one command, each command with an empty memory."""
    rows, models, each = (
        Rows("eight", options.out, options.code),
        options.models.split(","),
        options.trials_per_subgraph,
    )
    for model in models:
        if not rows.has(how="alone", model=model, each=each):
            place = _empty(options, f"alone-{model}-{each}")
            status, wall_s = place.run("TuneModel", "--model", model, "--trials-per-subgraph", str(each))
            past = past_of(next(place.artifacts.glob(f"*/{model}/runs/*"), place.folder))
            own = tunable(place.artifacts, model)
            rows.add({"how": "alone", "model": model, "models": model, "each": each, "status": status, "wall_s": wall_s,
                      "subgraphs": len(own), "distinct": len(own), "trials": measured(past[1:]).total(),
                      **latencies(place.artifacts, model, past), **seconds(place.artifacts, past)})  # fmt: skip
            _lighten(place)
    if not rows.has(how="together", model="", models=options.models, each=each):
        _together(options, rows, models)


def _together(options: argparse.Namespace, rows: Rows, models: Sequence[str]) -> None:
    """A row of each model, and last one of all: of an interruption between them nothing is kept but double rows."""
    each = options.trials_per_subgraph
    place = _empty(options, f"together-{len(models)}-{each}")
    status, wall_s = place.run("TuneModels", "--models", options.models, "--trials-per-subgraph", str(each))
    past = past_of(next(place.artifacts.glob("*/nights/*/runs/*"), place.folder))
    key = {"how": "together", "models": options.models, "each": each, "status": status}
    found = measured(past[1:])
    counted: Counter[str] = Counter()
    for model in models:
        own = tunable(place.artifacts, model)
        counted.update(own.keys())
        rows.add({**key, "model": model, "subgraphs": len(own), "distinct": len(own),
                  "trials": sum(found[subgraph_id] for subgraph_id in own),
                  **latencies(place.artifacts, model, past)})  # fmt: skip
    rows.add({**key, "model": "", "wall_s": wall_s, "subgraphs": counted.total(), "distinct": len(counted),
              "tried": len(found), "trials": found.total(), **seconds(place.artifacts, past)})  # fmt: skip
    _lighten(place)


def _empty(options: argparse.Namespace, name: str) -> Place:
    folder = (options.work / name).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    return Place(folder, options.code)


def _lighten(place: Place) -> None:
    """Weights of all eight, alone and together, are some 30 GB."""
    for path in place.artifacts.rglob("*.npz"):
        path.unlink()


# A night that is killed.


@dataclass(frozen=True)
class Moment:
    """When to kill: once so much of something is there, and a random while later."""

    what: str  # a key of `Night.progress`
    share: float  # of the models; at least one

    def is_reached(self, progress: Mapping[str, int], models: int) -> bool:
        return progress[self.what] >= max(1, math.ceil(self.share * models))


# In the order in which they come. Rounds and first libraries take turns; after the last round each model gets one, for
# most of them another one.
MOMENTS = (
    Moment("imported", 0.2), Moment("imported", 0.9), Moment("joined", 0), Moment("rounds", 0),
    Moment("delivered", 0), Moment("delivered", 0.3), Moment("delivered", 0.6), Moment("renewed", 0.2),
    Moment("renewed", 0.6), Moment("renewed", 0.95),
)  # fmt: skip
_LATER_S = 4.0  # at most, after such a moment


class Night:
    """The files of one command, while it comes and goes."""

    def __init__(self, artifacts: Path) -> None:
        self._artifacts = artifacts
        self.seen: dict[str, float] = {}  # when each candidate was measured, as first seen
        self.lost: set[str] = set()

    def progress(self) -> dict[str, int]:
        """How much of everything is there."""
        trained = self._files("nights/*/runs/*/rounds/*/training.parquet")
        outcomes = self._files("nights/*/runs/*/models/*.json")
        return {
            "imported": len(self._files("*/subgraphs.parquet")),
            "joined": len(self._files("nights/*/subgraphs.parquet")),
            "rounds": len(trained),
            "delivered": len(outcomes),
            "renewed": sum(at > max(trained, default=math.inf) for at in outcomes),
        }

    def _files(self, pattern: str) -> list[float]:
        """Their dates; what goes while one looks is none."""
        return [path.stat().st_mtime for path in self._artifacts.glob(f"*/{pattern}") if path.exists()]

    def measured(self) -> dict[str, list[float]]:
        """When each candidate was measured, by the rounds of the night: twice is once too often."""
        found: dict[str, list[float]] = defaultdict(list)
        for path in self._artifacts.glob("*/nights/*/runs/*/rounds/*/measurements*.parquet"):
            for row in tables.read(path, MEASUREMENTS).select(["candidate_id", "measured_at"]).to_pylist():
                found[row["candidate_id"]].append(row["measured_at"])
        for path in self._artifacts.glob("*/nights/*/runs/*/rounds/*/measurements.jsonl"):
            for row in journal.read(path).rows:
                if row.measured_at not in found[row.candidate_id]:  # its table may be there, too
                    found[row.candidate_id].append(row.measured_at)
        return found

    def remembered(self) -> dict[str, list[float]]:
        """The same of the memory."""
        found: dict[str, list[float]] = defaultdict(list)
        for path in self._artifacts.glob("*/memory/*/*/*/*.parquet"):
            if not path.name.startswith("."):
                for row in tables.read(path, REMEMBERED).select(["candidate_id", "measured_at"]).to_pylist():
                    found[row["candidate_id"]].append(row["measured_at"])
        return found

    def look(self) -> None:
        """Compare with what was there before; nothing of the night may run meanwhile."""
        now = self.measured()
        self.lost |= {key for key, at in self.seen.items() if at not in now.get(key, [])}
        for key, found in now.items():
            self.seen.setdefault(key, min(found))

    def doubled(self) -> int:
        """Candidates that stand twice in rounds or memory, or in both with different dates."""
        rounds, memory = self.measured(), self.remembered()
        return sum(len(rounds.get(key, [])) > 1 or len(memory.get(key, [])) > 1
                   or len({*rounds.get(key, []), *memory.get(key, [])}) > 1
                   for key in {*rounds, *memory})  # fmt: skip

    def verified(self) -> int:
        """Models with a library that is whole and was compared with what it should compute."""
        return sum(map(_is_verified, self._artifacts.glob("*/*/runs/*/compiled/manifest.json")))

    def left(self) -> list[str]:
        """What should not outlive a command: see `tables.sweep` and `tables.written_whole`."""
        return [str(path.relative_to(self._artifacts)) for path in self._artifacts.rglob("*")
                if path.name.startswith((tables.BUILDING, ".", "tmp")) or path.suffix == ".jsonl"]  # fmt: skip


def _is_verified(path: Path) -> bool:
    try:
        facts, damaged = manifest.read(path), manifest.damaged_files(path)
    except TunerError:
        return False
    return not damaged and "model.so" in facts["files"] and facts["max_error"] <= 1e-3


def killed(options: argparse.Namespace) -> None:
    """Tune the small models, kill the command at each moment, look at what is left."""
    rows = Rows("killed", options.out, options.code)
    key = {"models": options.models, "wanted_kills": options.kills, "seed": options.seed}
    if rows.has(**key):
        return
    place = _fresh_night(options)
    night, rng = Night(place.artifacts), random.Random(options.seed)
    command = ["TuneModels", "--models", f"{place.folder / 'nets'}/*.onnx", "--trials-per-subgraph", "4"]
    moments = [MOMENTS[n * len(MOMENTS) // options.kills] for n in range(options.kills)]
    started, done, status = time.monotonic(), list[str](), None
    processes: list[psutil.Process] = []
    for moment in moments:
        later = rng.uniform(0, _LATER_S)
        with place.running(*command) as process:
            status = _ended_before(moment, later, process, night, options.models)
            processes += psutil.Process(process.pid).children(recursive=True) if status is None else []
        night.look()
        if status is not None:
            break
        done.append(f"{moment.what} {moment.share:g} +{later:.1f} s: {night.progress()}")
        print(f"{time.monotonic() - started:6.0f} s, killed at {done[-1]}, {len(night.seen)} candidates", flush=True)
    if status is None:
        status, _ = place.run(*command)
    wall_s = time.monotonic() - started
    night.look()
    again, second_start_s = place.run(*command)
    rows.add({**key, "kills": len(done), "moments": "; ".join(done), "status": status,
              "wall_s": wall_s, **_found(place, night, processes), "second_status": again,
              "second_start_s": second_start_s})  # fmt: skip


def _fresh_night(options: argparse.Namespace) -> Place:
    """An empty place, but for the models."""
    from soak_runs import network  # which puts this clone before that of PYTHONPATH, for what was not imported yet

    folder = (options.work / f"killed-{options.models}-{options.kills}-{options.seed}").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("nets", "tmp", "locks"):
        (folder / name).mkdir(parents=True)
    for seed in range(options.models):
        network(seed, folder / "nets" / f"net{seed:02d}.onnx")
    # Nothing is timed here, so it waits for nobody who measures on this machine.
    surroundings = {"TMPDIR": str(folder / "tmp"), "TUNER_LOCKS": str(folder / "locks")}
    return Place(folder, options.code, _QUICK, surroundings)


def _ended_before(
    moment: Moment, later_s: float, process: "subprocess.Popen[bytes]", night: Night, models: int
) -> int | None:
    """Wait for the moment to kill a command; its exit status, if it ended before."""
    while process.poll() is None and not moment.is_reached(night.progress(), models):
        time.sleep(0.1)
    with suppress(subprocess.TimeoutExpired):
        return process.wait(later_s)
    return None


def _found(place: Place, night: Night, processes: Sequence[psutil.Process]) -> Row:
    """What is wrong at the end, and what is there."""
    left = night.left() + [str(path.name) for path in (place.folder / "tmp").iterdir()]
    summary = next(place.artifacts.glob("*/nights/*/runs/*/summary.txt"), None)
    return {
        "subgraphs": summary.read_text().splitlines()[1] if summary else "",
        "libraries_verified": night.verified(), "candidates": len(night.measured()),
        "remembered": len(night.remembered()), "lost": len(night.lost), "doubled": night.doubled(),
        "tracebacks": place.tracebacks(), "left": len(left), "left_names": "; ".join(left[:5]),
        "processes_left": sum(process.is_running() and process.status() != psutil.STATUS_ZOMBIE
                              for process in processes),
    }  # fmt: skip


# Tables.


def show(folder: Path) -> None:
    """Print what rows a folder has."""
    for what, text in (("pairs", _pairs_table), ("killed", _killed_table), ("eight", _eight_table)):
        if (folder / f"{what}.parquet").exists():
            table = pd.read_parquet(folder / f"{what}.parquet")
            print(f"{text(table)}\n\n{_origin(table)}\n")


def _markdown(header: str, rows: Sequence[Sequence[Any]]) -> str:
    names = header.split(" | ")
    return "\n".join(f"| {' | '.join(map(_text, row))} |" for row in (names, ["---"] * len(names), *rows))


def _text(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return "-" if math.isnan(value) else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _origin(table: pd.DataFrame) -> str:
    return "; ".join(", ".join(map(str, found)) for found in
                     table[["cpu", "threads", "revision", "date"]].drop_duplicates().to_numpy())  # fmt: skip


def _pairs_table(table: pd.DataFrame) -> str:
    header = ("model | after | subgraphs | new | trials | of default | share | recalled | tuned, ms | untuned, ms | "
              "wall, s | second start, s")  # fmt: skip
    columns = ["model", "after", "subgraphs", "new", "trials", "alone", "share", "recalled", "tuned_ms", "untuned_ms",
               "wall_s", "second_start_s"]  # fmt: skip
    return _markdown(header, [[row[name] for name in columns] for row in table.to_dict("records")])


def _killed_table(table: pd.DataFrame) -> str:
    names = [name for name in table if name not in ("cpu", "threads", "revision", "date")]
    return _markdown(" | ".join(["", *("night" for _ in range(len(table)))]), [[name, *table[name]] for name in names])


def _eight_table(table: pd.DataFrame) -> str:
    """A line for each model, and what all of them come to, of the last command that tuned them together."""
    together = table[table["how"] == "together"]
    if together.empty or not (together["model"] == "").any():
        return "eight: not all were tuned yet"
    whole = together[together["model"] == ""].iloc[-1]
    alone = table[(table["how"] == "alone") & (table["each"] == whole["each"])].set_index("model")
    joint = together[(together["each"] == whole["each"]) & (together["models"] == whole["models"])]
    joint = joint.drop_duplicates("model", keep="last").set_index("model")
    names = [name for name in whole["models"].split(",") if name in alone.index and name in joint.index]
    ratios = (joint["tuned_ms"] / alone["tuned_ms"])[names]
    lines = [[name, alone["subgraphs"][name], alone["trials"][name], alone["wall_s"][name], alone["tuned_ms"][name],
              joint["tuned_ms"][name], ratios[name], alone["untuned_ms"][name], alone["estimate_ms"][name],
              joint["estimate_ms"][name]] for name in names]  # fmt: skip
    header = ("model | subgraphs | trials alone | wall alone, s | tuned alone, ms | together, ms | together / alone | "
              "untuned, ms | estimate alone, ms | estimate together, ms")  # fmt: skip
    return f"{_markdown(header, lines)}\n\n{_savings(whole, alone.loc[names], ratios)}"


def _savings(whole: "pd.Series[Any]", alone: pd.DataFrame, ratios: "pd.Series[float]") -> str:
    """What tuning together saved, and what it cost."""
    kinds = ["import_s", "search_s", "measure_s", "train_s", "compile_s"]
    clocks = ", ".join(f"{kind[:-2]} {_text(whole[kind])} s ({_text(float(alone[kind].sum()))} s)" for kind in kinds)
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    wall, walls = float(whole["wall_s"]), float(alone["wall_s"].sum())
    return (
        f"{whole['subgraphs']} subgraphs in all, {whole['distinct']} different ones, {whole['tried']:.0f} of them "
        f"measured; {whole['trials']} trials, alone {alone['trials'].sum()}. Together {_text(wall)} s, one after the "
        f"other {_text(walls)} s: {wall / walls:.2f} of it. Geometric mean of tuned together / alone: {mean:.3f}. "
        f"Together (alone): {clocks}."
    )


def main() -> None:
    """Run one subject, or print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, help="print what rows this folder has")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--work", type=Path, required=True, help="gets artifacts and logs, gigabytes of them")
    shared.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "nights")
    shared.add_argument("--code", type=Path, default=ROOT, help="the clone whose commands are run")
    subjects = parser.add_subparsers()

    def subject(name: str, run: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
        own = subjects.add_parser(name, parents=[shared], help=run.__doc__)
        own.set_defaults(run=run)
        return own

    of_pairs = subject("pairs", pairs)
    of_pairs.add_argument("--pairs", nargs="+", default=PAIRS, help="of the zoo, each with a comma")
    of_pairs.add_argument("--trials-per-subgraph", type=int, default=64)
    of_killed = subject("killed", killed)
    of_killed.add_argument("--models", type=int, default=50)
    of_killed.add_argument("--kills", type=int, default=10)
    of_killed.add_argument("--seed", type=int, default=0)
    of_eight = subject("eight", eight)
    of_eight.add_argument("--models", default=EIGHT, help="of the zoo, with commas")
    of_eight.add_argument("--trials-per-subgraph", type=int, default=16)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and what it started ends with it
    if options.table:
        show(options.table)
    elif "run" in options:
        options.code = options.code.resolve()
        options.run(options)
    else:
        parser.error("pairs, killed, eight or --table?")


if __name__ == "__main__":
    main()

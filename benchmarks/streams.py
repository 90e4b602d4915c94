"""Does the order in which a device gets its work done ever matter? The device-decided loop on the simulated device.

    python benchmarks/streams.py                                        10,000 orders of a tiny trio, made on the spot
    python benchmarks/streams.py bundles/smollm2-135m --schedules 20    of a bundle

Each schedule is a few requests at once, of mixed modes and lengths and sometimes sampled, on a device that runs their
work late and in an order drawn from a seed. Every answer must be the one that the CPU gives to that request alone. Half
of the schedules run the split layout, half the fused one, where the bundle has it.

Then every place in the loop that orders work (record, wait, synchronize) is left out, one at a time: the device must
find each. Requests whose best two tokens ever come closer than 1e-4 are not used: a batch and a single request are
different matrix products. Exits 1 if anything was found that should not be, or was not found.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xpress_export import names
from xpress_export.manifest import read_manifest
from xpress_export.runtime import Generation, Runtime, SamplingParams
from xpress_export.runtime.schedules import RandomOrder
from xpress_export.runtime.simulator import SimulatedDevice, Site

NEAR_TIE = 1e-4
NUM_SLOTS, CHUNK, NUM_JOBS = 4, 8, 24
LONG = 250  # tokens of a prompt that is read in many chunks, and outgrows the first cache while it is answered
PATIENCE_S = 300.0
MOST_LISTED = 5


@dataclass(frozen=True)
class Job:
    """A request and the CPU's answer to it."""

    prompt: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]
    answer: tuple[int, ...] = ()

    def submit(self, runtime: Runtime, **more: Any) -> Generation:
        return runtime.submit(list(self.prompt), SamplingParams(**dict(self.options), **more))


@dataclass
class Tally:
    """What happened in one layout."""

    layout: str
    num_schedules: int = 0
    num_operations: int = 0
    num_sites: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    hazards: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        return not (self.wrong or self.hazards or self.missed) and self.num_sites > 0


def make_bundle(folder: Path) -> Path:
    """The tiny trio of the tests, exported in both layouts."""
    path = Path(__file__).parents[1] / "tests" / "conftest.py"
    spec = importlib.util.spec_from_file_location("tiny", path)
    assert spec is not None and spec.loader is not None
    tiny = sys.modules["tiny"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    maker = tiny.TrioMaker()
    model = maker.target(folder / "target")
    maker.drafter(folder / "drafter", maker.drafter_config(), model)
    maker.refiner(folder / "refiner", "xpress")
    sources = {role: str(folder / role) for role in names.ROLES}
    options = tiny.ExportOptions(**sources, max_context=600, trained=False, layout=names.LAYOUT_FUSED)
    tiny.export(options, folder / "bundle")
    return folder / "bundle"


def make_jobs(bundle: Path, layout: str, seed: int) -> list[Job]:
    """Requests and their answers, two long ones first; all modes, two sampled where the host may choose."""
    rng, jobs = random.Random(seed), list[Job]()
    with open_on(SimulatedDevice(), bundle, layout) as runtime:
        modes, vocab_size = runtime.modes, runtime.manifest.target.vocab_size
    with Runtime.open(bundle, device="cpu", layout=names.LAYOUT_SPLIT, num_slots=1, num_threads=1) as runtime:
        while len(jobs) < NUM_JOBS:
            number = len(jobs)
            is_sampled = number in {2, 3} and layout == names.LAYOUT_SPLIT
            options = {
                "max_new_tokens": 12 if number < 2 else rng.randint(1, 10),
                "mode": modes[-1 - number % len(modes)],
                "ignore_eos": True,
                **({"temperature": 1.0, "seed": number} if is_sampled else {}),
            }
            size = LONG if number < 2 else rng.choice((1, 3, 6, 12, 30))
            job = Job(tuple(rng.randrange(vocab_size) for _ in range(size)), tuple(options.items()))
            result = job.submit(runtime, logprobs=2).result(PATIENCE_S)
            gaps = [abs(token.top[0][1] - token.top[1][1]) for token in result.logprobs]
            if is_sampled or min(gaps) > NEAR_TIE:
                jobs.append(Job(job.prompt, job.options, tuple(result.token_ids)))
    return jobs


def open_on(device: SimulatedDevice, bundle: Path, layout: str) -> Runtime:
    return Runtime.open(bundle, device=device, layout=layout, num_slots=NUM_SLOTS, prefill_chunk=CHUNK)


def run_wave(runtime: Runtime, device: SimulatedDevice, jobs: Sequence[Job]) -> list[str]:
    """Submit all jobs before any work is done; what went wrong."""
    with device.lock:
        handles = [job.submit(runtime) for job in jobs]
    wrong = []
    for job, handle in zip(jobs, handles, strict=True):
        try:
            found = handle.result(PATIENCE_S).token_ids
        except Exception as error:
            wrong.append(f"{type(error).__name__}: {error}")
        else:
            if tuple(found) != job.answer:
                wrong.append(f"{dict(job.options)}, a prompt of {len(job.prompt)}: {found} is not {job.answer}")
    return wrong


def run_schedules(bundle: Path, tally: Tally, jobs: Sequence[Job], seeds: Sequence[int]) -> None:
    """One open runtime; before each wave a new order."""
    device = SimulatedDevice()
    started = time.monotonic()
    with open_on(device, bundle, tally.layout) as runtime:
        for seed in seeds:
            rng = random.Random(seed)
            with device.lock:
                device.order = RandomOrder(seed)
            picked = rng.sample(jobs[2:], rng.randint(2, NUM_SLOTS + 1))
            if rng.random() < 0.05:
                picked[0] = jobs[rng.randrange(2)]
            tally.wrong += [f"order {seed}: {what}" for what in run_wave(runtime, device, picked)]
            tally.num_schedules += 1
            if tally.num_schedules % 50 == 0:
                print(f"\r{tally.layout}: {tally.num_schedules} schedules", end="", file=sys.stderr)
            if len(tally.wrong) > MOST_LISTED:
                break
    print(file=sys.stderr)
    tally.seconds = time.monotonic() - started
    tally.num_operations = device.num_done
    tally.hazards = [str(hazard) for hazard in device.hazards]


def leave_out(bundle: Path, layout: str, jobs: Sequence[Job], site: Site | None) -> SimulatedDevice:
    """All jobs, then one more after they have gone, until something is found."""
    device = SimulatedDevice(without=site)
    with open_on(device, bundle, layout) as runtime:
        for wave in (jobs, jobs[-1:]):
            run_wave(runtime, device, wave)
            if device.hazards:
                break
    return device


def sweep(bundle: Path, tally: Tally, jobs: Sequence[Job]) -> None:
    """Leave out one place at a time."""
    sites = sorted(leave_out(bundle, tally.layout, jobs, None).sites)
    tally.num_sites = len(sites)
    tally.missed = [str(site) for site in sites if not leave_out(bundle, tally.layout, jobs, site).hazards]


def print_table(tallies: Sequence[Tally]) -> None:
    print(
        f"{'layout':8}{'schedules':>10}{'operations':>12}{'different':>11}{'hazards':>9}{'waits':>7}{'found':>7}{'s':>7}"
    )
    for tally in tallies:
        found = tally.num_sites - len(tally.missed)
        print(
            f"{tally.layout:8}{tally.num_schedules:>10,}{tally.num_operations:>12,}{len(tally.wrong):>11}"
            f"{len(tally.hazards):>9}{tally.num_sites:>7}{found:>7}{tally.seconds:>7.0f}"
        )
    for tally in tallies:
        for what, lines in (("different", tally.wrong), ("hazard", tally.hazards), ("not found", tally.missed)):
            for line in lines[:MOST_LISTED]:
                print(f"{tally.layout}, {what}: {line}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, nargs="?", help="left out: a tiny one is made")
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule; the next has the next")
    asked = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        bundle = asked.bundle or make_bundle(Path(folder))
        layouts = names.LAYOUTS if names.STEP in read_manifest(bundle).cycle else names.LAYOUTS[:1]
        tallies = []
        for i, layout in enumerate(layouts):
            jobs = make_jobs(bundle, layout, asked.seed)
            tallies.append(Tally(layout))
            seeds = range(asked.seed + i, asked.seed + asked.schedules, len(layouts))
            run_schedules(bundle, tallies[-1], jobs, seeds)
            sweep(bundle, tallies[-1], jobs)
    print_table(tallies)
    is_right = all(tally.is_right for tally in tallies)
    print("no order matters, and every wait is needed" if is_right else "FAILED")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())

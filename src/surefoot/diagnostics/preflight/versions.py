"""Checks of versions and of what the environment loads. Pure."""

from surefoot.diagnostics.preflight.check import Check, CheckContext, fail, not_applicable, ok
from surefoot.diagnostics.preflight.env_vars import variables
from surefoot.diagnostics.preflight.gpus import used
from surefoot.diagnostics.preflight.known_issues import bad_pairs, known_bad, numbers

LEAST_DRIVER = {13: (580,), 12: (525, 60, 13), 11: (450, 80, 2)}
"""CUDA's major version -> the oldest Linux driver that runs it.
Source: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html, read 2026-11"""
CAPABILITIES = {(12, 8): ((7, 5), None), (12,): ((5, 0), (9, 0))}
"""From which CUDA on -> the oldest and the newest GPUs that PyTorch's builds have code for, as compute capabilities;
the first that fits holds. Source: release notes of CUDA 12.8 and 13.0, pytorch/pytorch#157517, #172352, read 2026-11"""
LEAST_KERNEL = (5, 5)
"""Source: huggingface/accelerate#1929, which also warns of older ones."""


def versions(seen: CheckContext) -> Check:
    name, found, gpus = "versions", seen.machine.versions, seen.gpus
    said = ", ".join(
        f"{one} {found[one]}"
        for one in ("torch", "cuda", "nccl", "driver", "transformers", "peft", "vllm")
        if one in found
    )
    driver, cuda = found.get("driver"), found.get("cuda")
    wants_gpus = gpus > 0 and (seen.run is None or seen.run.device != "cpu")
    if wants_gpus and cuda is None and "torch" in found:
        return fail(
            name,
            "SF709",
            f"this machine has {gpus} GPUs, and torch {found['torch']} was built without CUDA",
            fix="pip install torch from PyPI or https://download.pytorch.org/whl for your CUDA; or device=cpu.",
            torch=found["torch"],
        )
    pairs = list(bad_pairs(found))
    if pairs:
        both = [" and ".join(f"{one} {found[one]}" for one in pair.packages) for pair in pairs]
        causes = [
            f"{which} do not go together: {pair.what} ({pair.source})" for which, pair in zip(both, pairs, strict=True)
        ]
        return fail(name, "SF709", "; ".join(causes), fix=" ".join(pair.fix for pair in pairs), found=both)
    if seen.is_on_gpus:
        least = LEAST_DRIVER.get(numbers(cuda or "0")[0])
        if driver and least and numbers(driver) < least:
            needed = ".".join(map(str, least))
            return fail(name, "SF709", f"torch was built for CUDA {cuda}, which needs a driver from {needed} on, and "
                         f"this machine's is {driver}", driver=driver, cuda=cuda, needed=needed)  # fmt: skip
        strange = next((card for card in used(seen) if cuda and not _is_compiled_for(card.capability, cuda)), None)
        if strange is not None:
            return fail(
                name,
                "SF709",
                f"GPU {strange.index}, {strange.name}, has compute capability {strange.capability}, and PyTorch's "
                f"own builds with CUDA {cuda} have no code for it",
                fix="pip install a torch that was built with another CUDA: from 12.8 on for 10.0 and newer, 12.6 for "
                "what is older than 7.5. torch.cuda.get_arch_list() tells what it has code for.",
                capability=strange.capability,
                cuda=cuda,
            )
        bad = known_bad(seen)
        if bad is not None:
            version = f"{bad.package} {found[bad.package]}"
            return fail(name, "SF709", f"with {version} {bad.what} ({bad.source})", fix=bad.fix, version=version)
    kernel = seen.machine.kernel
    if gpus > 1 and seen.uses_nccl and kernel and numbers(kernel) < LEAST_KERNEL:
        return fail(name, "SF709", f"the kernel is {seen.machine.kernel}; before 5.5 ranks are known to hang in their "
                     "first meeting", kernel=seen.machine.kernel)  # fmt: skip
    return ok(name, said) if said else not_applicable(name, seen.machine.unknown.get("versions", "not known"))


def _is_compiled_for(capability: str, cuda: str) -> bool:
    if not capability:  # not told
        return True
    known = [both for since, both in CAPABILITIES.items() if numbers(cuda) >= since]
    if not known:
        return True
    oldest, newest = known[0]
    # What is compiled for one runs on later ones of the same major version.
    return oldest <= numbers(capability) and (newest is None or numbers(capability)[0] <= newest[0])


def library_path(seen: CheckContext) -> Check:
    """Another NCCL than torch's own is loaded where one stands in the way of it."""
    name, environment = "NCCL that is loaded", seen.machine.environment
    if not seen.uses_nccl:
        return not_applicable(name, "only runs of several GPUs use it")
    preloaded = [one for one in environment.get("LD_PRELOAD", "").split(":") if "nccl" in one]
    if preloaded:
        return fail(
            name,
            "SF709",
            f"LD_PRELOAD puts {', '.join(preloaded)} before the NCCL that torch came with",
            fix="unset LD_PRELOAD, unless it is meant: then all machines must have the same.",
            LD_PRELOAD=environment["LD_PRELOAD"],
        )
    if seen.machine.other_nccl:
        found = seen.machine.other_nccl[0]
        return fail(name, "SF709", f"LD_LIBRARY_PATH puts {found} before the NCCL that torch came with", found=found,
                     fix="Take its folder out of LD_LIBRARY_PATH, unless it is meant: then all machines must have the "
                     "same. `surefoot doctor --deep` says which one is loaded.")  # fmt: skip
    return ok(name, f"torch's own, {seen.machine.versions.get('nccl', 'version not known')}")


CHECKS = (versions, library_path, variables)

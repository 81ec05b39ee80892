"""Checks of package versions and of the libraries that the environment loads. Pure."""

from surefoot.diagnostics.preflight.check import CheckContext, NotApplicable, Result, fail, ok
from surefoot.diagnostics.preflight.gpus import select_gpus
from surefoot.diagnostics.preflight.known_issues import find_incompatible_pairs, find_known_issue, parse_version

SHOWN_PACKAGES = ("torch", "cuda", "nccl", "driver", "transformers", "peft", "vllm")
LEAST_DRIVER = {13: (580,), 12: (525, 60, 13), 11: (450, 80, 2)}
"""Major version of CUDA -> the oldest Linux driver that runs it.
Source: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html, read 2026-11"""
CAPABILITIES = {(12, 8): ((7, 5), None), (12,): ((5, 0), (9, 0))}
"""First CUDA version -> the oldest and newest compute capabilities that PyTorch's builds have code for. The first
entry that fits applies. Source: release notes of CUDA 12.8 and 13.0, pytorch/pytorch#157517, #172352, read 2026-11"""
LEAST_KERNEL = (5, 5)
"""Oldest kernel without known hangs. Source: huggingface/accelerate#1929, which also warns of older ones."""


def check_versions(context: CheckContext) -> Result:
    installed, gpus = context.machine.versions, context.gpus
    uses_gpus = gpus > 0 and (context.run is None or context.run.device != "cpu")
    if uses_gpus and "cuda" not in installed and "torch" in installed:
        cause = f"this machine has {gpus} GPUs, and torch {installed['torch']} was built without CUDA"
        fix = "pip install torch from PyPI or https://download.pytorch.org/whl for your CUDA; or device=cpu."
        return fail("SF709", cause, fix=fix, torch=installed["torch"])
    pairs = list(find_incompatible_pairs(installed))
    if pairs:
        conflicts = {
            pair: " and ".join(f"{package} {installed[package]}" for package in pair.packages) for pair in pairs
        }
        cause = "; ".join(f"{text} are incompatible: {pair.what} ({pair.source})" for pair, text in conflicts.items())
        return fail("SF709", cause, fix=" ".join(pair.fix for pair in pairs), found=list(conflicts.values()))
    if context.is_on_gpus and (problem := _check_cuda(context)) is not None:
        return problem
    kernel = context.machine.kernel
    if gpus > 1 and context.uses_nccl and kernel and parse_version(kernel) < LEAST_KERNEL:
        cause = f"the kernel is {kernel}; before 5.5, ranks are known to hang in their rendezvous"
        return fail("SF709", cause, kernel=kernel)
    shown = [f"{package} {installed[package]}" for package in SHOWN_PACKAGES if package in installed]
    if not shown:
        raise NotApplicable(context.machine.unknown.get("versions", "not known"))
    return ok(", ".join(shown))


def _check_cuda(context: CheckContext) -> Result | None:
    """Check torch's CUDA against the driver and the GPUs, and for known issues. Returns None if nothing is wrong."""
    installed = context.machine.versions
    driver, cuda = installed.get("driver"), installed.get("cuda")
    least = LEAST_DRIVER.get(parse_version(cuda or "0")[0])
    if driver and least and parse_version(driver) < least:
        needed = ".".join(map(str, least))
        cause = (
            f"torch was built for CUDA {cuda}, which needs a driver from {needed} on, and this machine's is {driver}"
        )
        return fail("SF709", cause, driver=driver, cuda=cuda, needed=needed)
    for card in select_gpus(context):
        if cuda and not _is_compiled_for(card.capability, cuda):
            return fail(
                "SF709",
                f"GPU {card.index}, {card.name}, has compute capability {card.capability}, and PyTorch's own builds "
                f"with CUDA {cuda} have no code for it",
                fix="pip install a torch that was built with another CUDA: from 12.8 on for 10.0 and newer, 12.6 for "
                "what is older than 7.5. torch.cuda.get_arch_list() lists what it has code for.",
                capability=card.capability,
                cuda=cuda,
            )
    issue = find_known_issue(context)
    if issue is not None:
        version = f"{issue.package} {installed[issue.package]}"
        return fail("SF709", f"with {version} {issue.what} ({issue.source})", fix=issue.fix, version=version)
    return None


def _is_compiled_for(capability: str, cuda: str) -> bool:
    limits = next((limits for since, limits in CAPABILITIES.items() if parse_version(cuda) >= since), None)
    if not capability or limits is None:  # unknown
        return True
    oldest, newest = limits
    # Code for one capability runs on later ones of the same major version.
    return oldest <= parse_version(capability) and (newest is None or parse_version(capability)[0] <= newest[0])


def check_loaded_nccl(context: CheckContext) -> Result:
    """Check that no other NCCL is loaded instead of the one that torch came with."""
    environment = context.machine.environment
    if not context.uses_nccl:
        raise NotApplicable("only runs of several GPUs use it")
    preloaded = [library for library in environment.get("LD_PRELOAD", "").split(":") if "nccl" in library]
    if preloaded:
        cause = f"LD_PRELOAD puts {', '.join(preloaded)} before the NCCL that torch came with"
        fix = "unset LD_PRELOAD, unless it is intended: then all machines must have the same."
        return fail("SF709", cause, fix=fix, LD_PRELOAD=environment["LD_PRELOAD"])
    if context.machine.other_nccl:
        path = context.machine.other_nccl[0]
        return fail(
            "SF709",
            f"LD_LIBRARY_PATH puts {path} before the NCCL that torch came with",
            fix="Take its folder out of LD_LIBRARY_PATH, unless it is intended: then all machines must have the same. "
            "`surefoot doctor --deep` shows which one is loaded.",
            found=path,
        )
    return ok(f"torch's own, {context.machine.versions.get('nccl', 'version not known')}")

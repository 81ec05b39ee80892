"""Checks of names, interfaces and InfiniBand. Pure."""

import ipaddress
from collections.abc import Mapping, Sequence

from surefoot.diagnostics.preflight.check import Check, CheckContext, fail, not_applicable, ok
from surefoot.system.machine import ELSEWHERE, LISTENS, Interface, Port

NAMING = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME")
"""Variables that name network interfaces."""
LEAST_ROCE_MTU = 4200
GLOO_NAMES = (
    "Gloo takes names as they are, without ^ and =. Set it to an interface that `ip addr` shows with an address."
)


def host_name(seen: CheckContext) -> Check:
    name, addresses = "host name", seen.machine.host_addresses
    if not addresses:
        why = seen.machine.unknown.get("host_addresses", "it has none")
        if seen.nodes > 1:
            return fail(name, "SF704", f"the name {seen.machine.host} of this machine has no address: {why}",
                         host=seen.machine.host)  # fmt: skip
        return not_applicable(name, f"{why}; only runs of several machines need it")
    said = f"{seen.machine.host} is {', '.join(addresses)}"
    is_named = any(seen.machine.environment.get(variable) for variable in NAMING)
    if seen.nodes > 1 and not is_named and all(_is_loopback(address) for address in addresses):
        # Where the meeting point is on this machine, all of the run may be.
        is_fatal = seen.machine.rendezvous.startswith(ELSEWHERE)
        return fail(name, "SF704", f"{said}: other machines are sent to themselves", is_fatal=is_fatal, addresses=said)
    return ok(name, said)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def interfaces(seen: CheckContext) -> Check:
    name, there = "interfaces", seen.machine.interfaces
    if not there:
        return not_applicable(name, seen.machine.unknown.get("interfaces", "none"))
    for variable in NAMING:
        value = seen.machine.environment.get(variable, "")
        if value and _matters(variable, seen):
            found = _misnamed(variable, value, seen)
            if found is not None:
                return found
    up = [one for one, about in sorted(there.items()) if about.is_up]
    return ok(name, f"up: {', '.join(up)}")


def _matters(variable: str, seen: CheckContext) -> bool:
    return seen.ranks > 1 if variable.startswith("GLOO") else seen.uses_nccl


def _misnamed(variable: str, value: str, seen: CheckContext) -> Check | None:
    """What is wrong with the interfaces that a variable names, if anything."""
    name, there, said = "interfaces", seen.machine.interfaces, f"{variable}={value}"
    if variable.startswith("GLOO"):
        # It knows no prefixes and no signs, and uses every interface of its list.
        asked = value.removesuffix(",").split(",")
        bare = [one for one in asked if one in there and not there[one].addresses]
        missing = [one for one in asked if one not in there]
        if bare and not missing:
            cause = f"{said} names {', '.join(bare)}, which has no address; of this machine {_names(there)} are known"
            return fail(name, "SF705", cause, is_fatal=True, variable=said)
        if missing:
            which = "no interface" if len(missing) == len(asked) else f"{', '.join(missing)}, which is none,"
            cause = f"{said} names {which} of this machine, which has {_names(there)}"
            fix = GLOO_NAMES if any(one.startswith(("^", "=")) for one in missing) else ""
            return fail(name, "SF705", cause, is_fatal=True, variable=said, fix=fix)
    wanted = value.lstrip("^=").split(",")
    if value.startswith("^"):
        if seen.nodes > 1 and not any("lo".startswith(one) for one in wanted if one):
            return fail(
                name,
                "SF705",
                f"{said} leaves the loopback interface in, which no other machine can reach",
                fix=f"export {said},lo, or name the interface itself.",
                variable=said,
            )
        return None
    is_exact = value.startswith("=")
    meant = [one for one in there if any(one == want or (not is_exact and one.startswith(want)) for want in wanted)]
    if not meant:
        cause = f"{said} names no interface of this machine, which has {_names(there)}"
        return fail(name, "SF705", cause, is_fatal=True, variable=said)
    if not any(there[one].is_up for one in meant):
        return fail(name, "SF705", f"{said} names {', '.join(meant)}, which is down", is_fatal=True, variable=said)
    unfit = [one for one in meant if not _reaches_others(one, there[one])]
    if seen.nodes > 1 and len(unfit) == len(meant):
        cause = f"{said} names {', '.join(meant)}, which reaches no other machine"
        return fail(name, "SF705", cause, variable=said)
    return None


def _names(there: Mapping[str, Interface]) -> str:
    return ", ".join(sorted(there))


def _reaches_others(name: str, about: Interface) -> bool:
    """Whether it may be one of a network: not of this machine's containers alone, and with an address."""
    is_inside = all(_is_loopback(address) for address in about.addresses)  # also where there is none
    return not is_inside and not name.startswith(("docker", "veth", "virbr", "br-"))


def infiniband(seen: CheckContext) -> Check:
    name, environment = "InfiniBand", seen.machine.environment
    if not seen.machine.ports:
        return not_applicable(name, "no device")
    said = _as_text(seen.machine.ports)
    if not seen.uses_nccl or seen.nodes == 1:
        return ok(name, f"{said}; only NCCL between machines uses it")
    if environment.get("NCCL_IB_DISABLE") == "1" and any("ACTIVE" in port.state for port in seen.machine.ports):
        return fail(name, "SF706", f"NCCL_IB_DISABLE=1 although ports are active: {said}", ports=said)
    adapters = environment.get("NCCL_IB_HCA", "")
    ports = [port for port in seen.machine.ports if not adapters or _is_meant(port, adapters)]
    if not ports:
        return fail(name, "SF706", f"NCCL_IB_HCA={adapters} leaves no port of this machine, which has {said}: NCCL "
                     "falls back to sockets", ports=said, fix="Name adapters that `ibstat` shows, or unset NCCL_IB_HCA."
                     )  # fmt: skip
    active, said = [port for port in ports if "ACTIVE" in port.state], _as_text(ports)
    if len(active) < min(len(ports), seen.local_ranks):  # others may be of storage, or spare
        return fail(name, "SF706", f"not all ports are active: {said}", ports=said)
    has_infiniband = any(port.link_layer == "InfiniBand" for port in active)
    # Beside it a port of Ethernet is another network's.
    roce = [port for port in active if port.link_layer == "Ethernet" and not has_infiniband]
    index = environment.get("NCCL_IB_GID_INDEX", "")
    for port in roce if index.isdigit() else ():
        chosen = next((gid for gid in port.gids if gid.startswith(f"{index}:")), None)
        if chosen is None or "v1" in chosen or ":fe80:" in chosen:
            what = f"is {chosen}, which is not routed" if chosen else f"is not set; there are {', '.join(port.gids)}"
            return fail(name, "SF706", f"NCCL_IB_GID_INDEX={index}: that GID of {port.device} {what}",
                         gids="; ".join(port.gids))  # fmt: skip
    small = _with_small_packets(seen, [port.interface for port in roce])
    if small:
        return fail(name, "SF713", f"RoCE over {small}", interfaces=small)
    return ok(name, said)


def _as_text(ports: Sequence[Port]) -> str:
    return ", ".join(f"{port.device}:{port.port} {port.state} {port.rate}" for port in ports)


def _is_meant(port: Port, adapters: str) -> bool:
    """Whether NCCL_IB_HCA leaves a port in: `mlx5` means all that begin so, `=mlx5_0:1` one port, `^` all but these.

    Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-ib-hca
    """
    is_exact = adapters.lstrip("^").startswith("=")

    def names(wanted: str) -> bool:
        device, _, number = wanted.partition(":")
        fits = port.device == device if is_exact else port.device.startswith(device)
        return fits and number in ("", str(port.port))

    is_named = any(names(wanted.strip()) for wanted in adapters.lstrip("^=").split(",") if wanted.strip())
    return is_named != adapters.startswith("^")


def _with_small_packets(seen: CheckContext, names: Sequence[str]) -> str:
    there = seen.machine.interfaces
    return ", ".join(
        f"{one} with an MTU of {there[one].mtu}" for one in names if one in there and there[one].mtu < LEAST_ROCE_MTU
    )


def peer_memory(seen: CheckContext) -> Check:
    name, loaded = "GPU memory for network cards", seen.machine.peer_memory
    if loaded is None:
        return not_applicable(name, "needs a GPU and an InfiniBand or RoCE card")
    if not loaded and seen.uses_nccl and seen.nodes > 1:
        return fail(name, "SF707", "nvidia_peermem is not loaded, and the driver is not the open one", loaded=False)
    return ok(name, "by DMA-BUF or nvidia_peermem" if loaded else "not loaded; only several machines need it")


def rendezvous(seen: CheckContext) -> Check:
    name = "rdzv_endpoint"
    if seen.run is None or seen.run.rdzv_endpoint is None or seen.nodes == 1:
        return not_applicable(name, "only runs of several machines need it")
    state = seen.machine.rendezvous
    if not state:
        why = seen.machine.unknown.get("rendezvous", "not known")
        return fail(name, "SF712", f"the host of {seen.run.rdzv_endpoint} is not known here: {why}",
                     endpoint=seen.run.rdzv_endpoint)  # fmt: skip
    host = seen.run.rdzv_endpoint.rpartition(":")[0]
    if host == "localhost" or _is_loopback(host):
        return fail(name, "SF704", f"{seen.run.rdzv_endpoint} is each machine itself, and {seen.nodes} machines are "
                     "to meet there: each would wait for the others alone", endpoint=seen.run.rdzv_endpoint,
                     fix="Give the first machine's address in the network between them.")  # fmt: skip
    if LISTENS in state:
        return fail(name, "SF737", f"{seen.run.rdzv_endpoint} is {state}", endpoint=seen.run.rdzv_endpoint)
    return ok(name, state)


CHECKS = (host_name, interfaces, infiniband, peer_memory, rendezvous)

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


def host_name(context: CheckContext) -> Check:
    name, addresses = "host name", context.machine.host_addresses
    if not addresses:
        why = context.machine.unknown.get("host_addresses", "it has none")
        if context.nodes > 1:
            return fail(name, "SF704", f"the name {context.machine.host} of this machine has no address: {why}",
                         host=context.machine.host)  # fmt: skip
        return not_applicable(name, f"{why}; only runs of several machines need it")
    summary = f"{context.machine.host} is {', '.join(addresses)}"
    is_named = any(context.machine.environment.get(variable) for variable in NAMING)
    if context.nodes > 1 and not is_named and all(_is_loopback(address) for address in addresses):
        # If the rendezvous is on this machine, all ranks of the run may be on it.
        is_fatal = context.machine.rendezvous.startswith(ELSEWHERE)
        return fail(
            name, "SF704", f"{summary}: other machines are sent to themselves", is_fatal=is_fatal, addresses=summary
        )
    return ok(name, summary)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def interfaces(context: CheckContext) -> Check:
    name, present = "interfaces", context.machine.interfaces
    if not present:
        return not_applicable(name, context.machine.unknown.get("interfaces", "none"))
    for variable in NAMING:
        value = context.machine.environment.get(variable, "")
        if value and _is_variable_read(variable, context):
            problem = _check_interface_names(variable, value, context)
            if problem is not None:
                return problem
    up = [interface for interface, state in sorted(present.items()) if state.is_up]
    return ok(name, f"up: {', '.join(up)}")


def _is_variable_read(variable: str, context: CheckContext) -> bool:
    return context.ranks > 1 if variable.startswith("GLOO") else context.uses_nccl


def _check_interface_names(variable: str, value: str, context: CheckContext) -> Check | None:
    """Check the interfaces that a variable names. Returns None if nothing is wrong with them."""
    name, present, setting = "interfaces", context.machine.interfaces, f"{variable}={value}"
    if variable.startswith("GLOO"):
        # Gloo supports no prefixes and no signs, and uses every interface of its list.
        requested = value.removesuffix(",").split(",")
        bare = [interface for interface in requested if interface in present and not present[interface].addresses]
        missing = [interface for interface in requested if interface not in present]
        if bare and not missing:
            cause = (
                f"{setting} names {', '.join(bare)}, which has no address; of this machine {_list_names(present)} are "
                "known"
            )
            return fail(name, "SF705", cause, is_fatal=True, variable=setting)
        if missing:
            which = "no interface" if len(missing) == len(requested) else f"{', '.join(missing)}, which is none,"
            cause = f"{setting} names {which} of this machine, which has {_list_names(present)}"
            fix = GLOO_NAMES if any(interface.startswith(("^", "=")) for interface in missing) else ""
            return fail(name, "SF705", cause, is_fatal=True, variable=setting, fix=fix)
    patterns = value.lstrip("^=").split(",")
    if value.startswith("^"):
        if context.nodes > 1 and not any("lo".startswith(interface) for interface in patterns if interface):
            return fail(
                name,
                "SF705",
                f"{setting} leaves the loopback interface in, which no other machine can reach",
                fix=f"export {setting},lo, or name the interface itself.",
                variable=setting,
            )
        return None
    is_exact = value.startswith("=")
    matches = [
        interface
        for interface in present
        if any(interface == pattern or (not is_exact and interface.startswith(pattern)) for pattern in patterns)
    ]
    if not matches:
        cause = f"{setting} names no interface of this machine, which has {_list_names(present)}"
        return fail(name, "SF705", cause, is_fatal=True, variable=setting)
    if not any(present[interface].is_up for interface in matches):
        return fail(
            name, "SF705", f"{setting} names {', '.join(matches)}, which is down", is_fatal=True, variable=setting
        )
    unfit = [interface for interface in matches if not _can_reach_other_machines(interface, present[interface])]
    if context.nodes > 1 and len(unfit) == len(matches):
        cause = f"{setting} names {', '.join(matches)}, which reaches no other machine"
        return fail(name, "SF705", cause, variable=setting)
    return None


def _list_names(interfaces: Mapping[str, Interface]) -> str:
    return ", ".join(sorted(interfaces))


def _can_reach_other_machines(name: str, interface: Interface) -> bool:
    """Return whether an interface may reach other machines: it has an address and is not for local containers alone."""
    is_inside = all(_is_loopback(address) for address in interface.addresses)  # also true without addresses
    return not is_inside and not name.startswith(("docker", "veth", "virbr", "br-"))


def infiniband(context: CheckContext) -> Check:
    name, environment = "InfiniBand", context.machine.environment
    if not context.machine.ports:
        return not_applicable(name, "no device")
    summary = _describe_ports(context.machine.ports)
    if not context.uses_nccl or context.nodes == 1:
        return ok(name, f"{summary}; only NCCL between machines uses it")
    if environment.get("NCCL_IB_DISABLE") == "1" and any("ACTIVE" in port.state for port in context.machine.ports):
        return fail(name, "SF706", f"NCCL_IB_DISABLE=1 although ports are active: {summary}", ports=summary)
    adapters = environment.get("NCCL_IB_HCA", "")
    ports = [port for port in context.machine.ports if not adapters or _is_selected(port, adapters)]
    if not ports:
        return fail(name, "SF706", f"NCCL_IB_HCA={adapters} leaves no port of this machine, which has {summary}: NCCL "
                     "falls back to sockets", ports=summary,
                     fix="Name adapters that `ibstat` shows, or unset NCCL_IB_HCA.")  # fmt: skip
    active, summary = [port for port in ports if "ACTIVE" in port.state], _describe_ports(ports)
    if len(active) < min(len(ports), context.local_ranks):  # the others may be for storage, or spare
        return fail(name, "SF706", f"not all ports are active: {summary}", ports=summary)
    has_infiniband = any(port.link_layer == "InfiniBand" for port in active)
    # Beside InfiniBand, an Ethernet port belongs to another network.
    roce = [port for port in active if port.link_layer == "Ethernet" and not has_infiniband]
    index = environment.get("NCCL_IB_GID_INDEX", "")
    for port in roce if index.isdigit() else ():
        chosen = next((gid for gid in port.gids if gid.startswith(f"{index}:")), None)
        if chosen is None or "v1" in chosen or ":fe80:" in chosen:
            problem = f"is {chosen}, which is not routed" if chosen else f"is not set; there are {', '.join(port.gids)}"
            return fail(name, "SF706", f"NCCL_IB_GID_INDEX={index}: that GID of {port.device} {problem}",
                         gids="; ".join(port.gids))  # fmt: skip
    small = _describe_small_mtus(context, [port.interface for port in roce])
    if small:
        return fail(name, "SF713", f"RoCE over {small}", interfaces=small)
    return ok(name, summary)


def _describe_ports(ports: Sequence[Port]) -> str:
    return ", ".join(f"{port.device}:{port.port} {port.state} {port.rate}" for port in ports)


def _is_selected(port: Port, adapters: str) -> bool:
    """Return whether NCCL_IB_HCA selects a port: `mlx5` is a prefix, `=mlx5_0:1` one port, `^` all but these.

    Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-ib-hca
    """
    is_exact = adapters.lstrip("^").startswith("=")

    def is_match(entry: str) -> bool:
        device, _, number = entry.partition(":")
        fits = port.device == device if is_exact else port.device.startswith(device)
        return fits and number in ("", str(port.port))

    is_named = any(is_match(entry.strip()) for entry in adapters.lstrip("^=").split(",") if entry.strip())
    return is_named != adapters.startswith("^")


def _describe_small_mtus(context: CheckContext, names: Sequence[str]) -> str:
    present = context.machine.interfaces
    return ", ".join(
        f"{name} with an MTU of {present[name].mtu}"
        for name in names
        if name in present and present[name].mtu < LEAST_ROCE_MTU
    )


def peer_memory(context: CheckContext) -> Check:
    name, loaded = "GPU memory for network cards", context.machine.peer_memory
    if loaded is None:
        return not_applicable(name, "needs a GPU and an InfiniBand or RoCE card")
    if not loaded and context.uses_nccl and context.nodes > 1:
        return fail(name, "SF707", "nvidia_peermem is not loaded, and the driver is not the open one", loaded=False)
    return ok(name, "by DMA-BUF or nvidia_peermem" if loaded else "not loaded; only several machines need it")


def rendezvous(context: CheckContext) -> Check:
    name = "rdzv_endpoint"
    if context.run is None or context.run.rdzv_endpoint is None or context.nodes == 1:
        return not_applicable(name, "only runs of several machines need it")
    state = context.machine.rendezvous
    if not state:
        why = context.machine.unknown.get("rendezvous", "not known")
        return fail(name, "SF712", f"the host of {context.run.rdzv_endpoint} is not known here: {why}",
                     endpoint=context.run.rdzv_endpoint)  # fmt: skip
    host = context.run.rdzv_endpoint.rpartition(":")[0]
    if host == "localhost" or _is_loopback(host):
        return fail(name, "SF704", f"{context.run.rdzv_endpoint} is each machine itself, and {context.nodes} machines "
                     "are to meet there: each would wait for the others alone", endpoint=context.run.rdzv_endpoint,
                     fix="Give the first machine's address in the network between them.")  # fmt: skip
    if LISTENS in state:
        return fail(name, "SF737", f"{context.run.rdzv_endpoint} is {state}", endpoint=context.run.rdzv_endpoint)
    return ok(name, state)


CHECKS = (host_name, interfaces, infiniband, peer_memory, rendezvous)

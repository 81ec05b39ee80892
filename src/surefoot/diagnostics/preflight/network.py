"""Checks of names, interfaces and InfiniBand. Pure."""

import ipaddress
from collections.abc import Mapping, Sequence

from surefoot.diagnostics.preflight.check import CheckContext, NotApplicable, Result, fail, ok
from surefoot.system.machine import ELSEWHERE, LISTENS, Interface, Port

NAMING = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME")
"""Variables that name network interfaces."""
LEAST_ROCE_MTU = 4200
GLOO_NAMES = (
    "Gloo takes names as they are, without ^ and =. Set it to an interface that `ip addr` shows with an address."
)


ONE_NETWORK = (
    "Name one of them in NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, or give each a network of its own. Linux answers "
    "for the address of one interface on any other in the same network (arp_ignore, arp_filter)."
)


def check_host_name(context: CheckContext) -> Result:
    host, addresses = context.machine.host, context.machine.host_addresses
    if not addresses:
        why = context.machine.unknown.get("host_addresses", "it has none")
        if context.nodes > 1:
            return fail("SF704", f"the name {host} of this machine has no address: {why}", host=host)
        raise NotApplicable(f"{why}; only runs of several machines need it")
    summary = f"{host} is {', '.join(addresses)}"
    # NCCL looks for an interface itself; gloo takes that of the host name unless it is told otherwise.
    is_named = bool(context.machine.environment.get("GLOO_SOCKET_IFNAME"))
    if context.nodes > 1 and not is_named and all(_is_loopback(address) for address in addresses):
        # If the rendezvous is on this machine, all ranks of the run may be on it.
        is_fatal = context.machine.rendezvous.startswith(ELSEWHERE)
        cause = f"{summary}: other machines would connect to themselves"
        return fail("SF704", cause, is_fatal=is_fatal, addresses=summary)
    own = {address.partition("%")[0] for state in context.machine.interfaces.values() for address in state.addresses}
    if context.nodes > 1 and not is_named and own and not own & {address.partition("%")[0] for address in addresses}:
        cause = f"{summary}, and no interface of this machine has that address: gloo cannot listen on it"
        return fail("SF704", cause, addresses=summary, own=", ".join(sorted(own)))
    return ok(summary)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def check_interfaces(context: CheckContext) -> Result:
    present = context.machine.interfaces
    if not present:
        raise NotApplicable(context.machine.unknown.get("interfaces", "none"))
    for variable in NAMING:
        value = context.machine.environment.get(variable, "")
        is_gloo = variable.startswith("GLOO")
        if value and (context.ranks > 1 if is_gloo else context.uses_nccl):
            problem = _check_gloo_names(f"{variable}={value}", value, context) if is_gloo else None
            problem = problem or _check_interface_names(f"{variable}={value}", value, context)
            if problem is not None:
                return problem
    shared = _find_shared_networks(present) if context.nodes > 1 else {}
    for network, names in shared.items():
        if not any(context.machine.environment.get(variable) for variable in NAMING):
            cause = f"{' and '.join(names)} are both in {network}: replies may leave by another one than they came in"
            return fail("SF705", cause, fix=ONE_NETWORK, interfaces=", ".join(names))
    up = [interface for interface, state in sorted(present.items()) if state.is_up]
    return ok(f"up: {', '.join(up)}")


def _find_shared_networks(interfaces: Mapping[str, Interface]) -> dict[str, list[str]]:
    """Return the networks in which several interfaces that are up have an address, with their names."""
    members: dict[str, list[str]] = {}
    for name, state in sorted(interfaces.items()):
        if state.is_up and _can_reach_other_machines(name, state):
            for network in state.networks:
                members.setdefault(network, []).append(name)
    return {network: names for network, names in members.items() if len(names) > 1}


def _check_gloo_names(setting: str, value: str, context: CheckContext) -> Result | None:
    """Check that all interfaces in a list for gloo exist and have addresses.

    Gloo supports no prefixes and no signs, and uses every interface of its list.
    """
    present, requested = context.machine.interfaces, value.removesuffix(",").split(",")
    bare = [interface for interface in requested if interface in present and not present[interface].addresses]
    missing = [interface for interface in requested if interface not in present]
    if missing:
        which = "no interface" if len(missing) == len(requested) else f"{', '.join(missing)}, which is none,"
        cause = f"{setting} names {which} of this machine, which has {_list_names(present)}"
        fix = GLOO_NAMES if any(interface.startswith(("^", "=")) for interface in missing) else ""
        return fail("SF705", cause, is_fatal=True, variable=setting, fix=fix)
    if bare:
        listed = f"of this machine {_list_names(present)} are known"
        cause = f"{setting} names {', '.join(bare)}, which has no address; {listed}"
        return fail("SF705", cause, is_fatal=True, variable=setting)
    return None


def _check_interface_names(setting: str, value: str, context: CheckContext) -> Result | None:
    """Check the interfaces that a variable names. Returns None if nothing is wrong with them."""
    present, patterns = context.machine.interfaces, value.lstrip("^=").split(",")
    if value.startswith("^"):
        if context.nodes > 1 and not any("lo".startswith(interface) for interface in patterns if interface):
            cause = f"{setting} leaves the loopback interface in, which no other machine can reach"
            fix = f"export {setting},lo, or name the interface itself."
            return fail("SF705", cause, fix=fix, variable=setting)
        return None
    is_exact = value.startswith("=")
    matches = [
        interface
        for interface in present
        if any(interface == pattern or (not is_exact and interface.startswith(pattern)) for pattern in patterns)
    ]
    if not matches:
        cause = f"{setting} names no interface of this machine, which has {_list_names(present)}"
        return fail("SF705", cause, is_fatal=True, variable=setting)
    if not any(present[interface].is_up for interface in matches):
        cause = f"{setting} names {', '.join(matches)}, which is down"
        return fail("SF705", cause, is_fatal=True, variable=setting)
    if context.nodes > 1 and not any(_can_reach_other_machines(name, present[name]) for name in matches):
        return fail("SF705", f"{setting} names {', '.join(matches)}, which reaches no other machine", variable=setting)
    return None


def _list_names(interfaces: Mapping[str, Interface]) -> str:
    return ", ".join(sorted(interfaces))


def _can_reach_other_machines(name: str, interface: Interface) -> bool:
    """Return whether an interface may reach other machines: it has an address and is not for local containers alone."""
    is_inside = all(_is_loopback(address) for address in interface.addresses)  # also true without addresses
    return not is_inside and not name.startswith(("docker", "veth", "virbr", "br-"))


def check_infiniband(context: CheckContext) -> Result:
    environment = context.machine.environment
    if not context.machine.ports:
        raise NotApplicable("no device")
    summary = _describe_ports(context.machine.ports)
    if not context.uses_nccl or context.nodes == 1:
        return ok(f"{summary}; only NCCL between machines uses it")
    if environment.get("NCCL_IB_DISABLE") == "1" and any("ACTIVE" in port.state for port in context.machine.ports):
        return fail("SF706", f"NCCL_IB_DISABLE=1 although ports are active: {summary}", ports=summary)
    adapters = environment.get("NCCL_IB_HCA", "")
    ports = [port for port in context.machine.ports if not adapters or _is_selected(port, adapters)]
    if not ports:
        cause = (
            f"NCCL_IB_HCA={adapters} leaves no port of this machine, which has {summary}: NCCL falls back to sockets"
        )
        fix = "Name adapters that `ibstat` shows, or unset NCCL_IB_HCA."
        return fail("SF706", cause, fix=fix, ports=summary)
    active, summary = [port for port in ports if "ACTIVE" in port.state], _describe_ports(ports)
    if len(active) < min(len(ports), context.local_ranks):  # the others may be for storage, or spare
        return fail("SF706", f"not all ports are active: {summary}", ports=summary)
    has_infiniband = any(port.link_layer == "InfiniBand" for port in active)
    # Beside InfiniBand, an Ethernet port belongs to another network.
    roce = [port for port in active if port.link_layer == "Ethernet" and not has_infiniband]
    index = environment.get("NCCL_IB_GID_INDEX", "")
    for port in roce if index.isdigit() else ():
        chosen = next((gid for gid in port.gids if gid.startswith(f"{index}:")), None)
        if chosen is None or "v1" in chosen or ":fe80:" in chosen:
            problem = f"is {chosen}, which is not routed" if chosen else f"is not set; there are {', '.join(port.gids)}"
            cause = f"NCCL_IB_GID_INDEX={index}: that GID of {port.device} {problem}"
            return fail("SF706", cause, gids="; ".join(port.gids))
    small = _describe_small_mtus(context, [port.interface for port in roce])
    if small:
        return fail("SF713", f"RoCE over {small}", interfaces=small)
    return ok(summary)


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


def check_peer_memory(context: CheckContext) -> Result:
    is_loaded = context.machine.peer_memory
    if is_loaded is None:
        raise NotApplicable("needs a GPU and an InfiniBand or RoCE card")
    if not is_loaded and context.uses_nccl and context.nodes > 1:
        return fail("SF707", "nvidia_peermem is not loaded, and the driver is not the open one", loaded=False)
    return ok("by DMA-BUF or nvidia_peermem" if is_loaded else "not loaded; only several machines need it")


def check_rendezvous(context: CheckContext) -> Result:
    endpoint = context.run.rdzv_endpoint if context.run is not None else None
    if endpoint is None or context.nodes == 1:
        raise NotApplicable("only runs of several machines need it")
    state = context.machine.rendezvous
    if not state:
        why = context.machine.unknown.get("rendezvous", "not known")
        return fail("SF712", f"the host of {endpoint} cannot be resolved on this machine: {why}", endpoint=endpoint)
    host = endpoint.rpartition(":")[0]
    if host == "localhost" or _is_loopback(host):
        meeting = f"{context.nodes} machines must meet there: each would wait for the others forever"
        fix = "Give the first machine's address in the network between them."
        return fail("SF704", f"{endpoint} is each machine itself, and {meeting}", fix=fix, endpoint=endpoint)
    if LISTENS in state:
        return fail("SF737", f"{endpoint} is {state}", endpoint=endpoint)
    return ok(state)

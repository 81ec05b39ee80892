"""Downloads from URLs in rows. The author of the rows chose the URLs, so each connection is checked.

A row may name a host of the user's own network, such as an image server. A redirect may not lead there: an outside
server chose it. The check is on the address of the connected socket, not on a name that is resolved again later.
"""

import base64
import http.client
import socket
import ssl
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import SplitResult

ANSWER_S, DOWNLOAD_S = 30.0, 120.0
"""Deadlines in seconds: until a server sends anything, and for a whole download with its redirects."""
MOST_REDIRECTS = 5
REDIRECTS = (301, 302, 303, 307, 308)
PORTS = {"http": 80, "https": 443}
HEADERS = {"User-Agent": "surefoot", "Accept": "image/*, */*;q=0.5", "Connection": "close"}
URL_CHARACTERS = "%/:=&?~+!$,;'@()*[]"
OWN_NETWORKS = [
    ip_network(network)
    for network in ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "::1/128", "fc00::/7")
]
"""Loopback and private addresses, which rows may name."""
METADATA = (ip_address("fd00:ec2::254"), ip_address("fd20:ce::254"))
"""Private addresses at which clouds serve credentials. Other such addresses are link-local or shared."""
NAT64 = ip_network("64:ff9b::/96")

Address = IPv4Address | IPv6Address


def download(url: str, *, most_bytes: int) -> bytes:
    """Return the content of an http or https URL, at most `most_bytes` + 1 bytes of it.

    Raises: OSError for a host that cannot or must not be connected to, or that takes too long; ValueError or
    HTTPException for an invalid URL or invalid HTTP.
    """
    deadline = time.monotonic() + DOWNLOAD_S
    try:
        for hop in range(MOST_REDIRECTS + 1):
            with _open_response(url, deadline, is_redirect=hop > 0) as response:
                location = response.headers.get("Location")
                if response.status not in REDIRECTS or not location:
                    return _read_body(response, most_bytes, deadline)
            location = urllib.parse.quote(location, f"{URL_CHARACTERS}#", encoding="latin-1")
            url = urllib.parse.urljoin(url, location)
    except (OSError, http.client.HTTPException) as error:
        if time.monotonic() < deadline:
            raise
        raise TimeoutError(f"not complete after {DOWNLOAD_S:g} s") from error
    raise OSError(f"more than {MOST_REDIRECTS} redirects")


def _read_body(response: http.client.HTTPResponse, most_bytes: int, deadline: float) -> bytes:
    if response.status != 200:
        raise OSError(f"HTTP status {response.status} {response.reason[:100]}")
    content = response.read(most_bytes + 1)
    if time.monotonic() >= deadline:  # the connection was shut down, which looks like its normal end
        raise TimeoutError
    if response.length and len(content) <= most_bytes:
        raise OSError(f"the connection ended after {len(content)} bytes; {response.length} more were announced")
    return content


@contextmanager
def _open_response(url: str, deadline: float, *, is_redirect: bool) -> Iterator[http.client.HTTPResponse]:
    """Send a request and yield the response. The connection is shut down at the deadline, in any phase."""
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname
    if parts.scheme not in PORTS or not host:
        raise OSError(f"{url[:200]!r} is neither http nor https")
    path = urllib.parse.quote(parts.path or "/", URL_CHARACTERS)
    target = f"{path}?{urllib.parse.quote(parts.query, URL_CHARACTERS)}" if parts.query else path
    port = parts.port or PORTS[parts.scheme]
    proxy = _find_proxy(parts.scheme, host)
    if proxy is None:
        channel = _connect(host, port, is_redirect=is_redirect)
    else:  # the proxy resolves the name and decides which hosts can be reached
        _check_name(host, is_redirect=is_redirect)
        channel = socket.create_connection((proxy.hostname or "", proxy.port or 80), ANSWER_S)
    with channel, _shut_down_at(channel, deadline):
        headers = {**HEADERS, "Host": parts.netloc.rpartition("@")[2]}
        if proxy is not None and parts.scheme == "https":
            _open_tunnel(channel, f"[{host}]:{port}" if ":" in host else f"{host}:{port}", _build_proxy_auth(proxy))
        elif proxy is not None:
            target, headers = f"http://{headers['Host']}{target}", {**headers, **_build_proxy_auth(proxy)}
        secured = parts.scheme == "https"
        connection = http.client.HTTPConnection(host, port)
        connection.sock = (
            ssl.create_default_context().wrap_socket(channel, server_hostname=host) if secured else channel
        )
        try:
            connection.request("GET", target, headers=headers)
            with connection.getresponse() as response:
                yield response
        finally:
            connection.close()


def _connect(host: str, port: int, *, is_redirect: bool) -> socket.socket:
    """Connect to the first address of a host that answers. Raises: OSError, also if any address is not allowed."""
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for *_, address in addresses:
        _check_address(ip_address(str(address[0]).partition("%")[0]), host, is_redirect=is_redirect)
    failure: OSError | None = None
    for family, kind, protocol, _, address in addresses:
        channel = socket.socket(family, kind, protocol)
        try:
            channel.settimeout(ANSWER_S)
            channel.connect(address)
        except OSError as error:
            channel.close()
            failure = error
        else:
            return channel
    raise failure or OSError(f"{host} has no address")


def _check_name(host: str, *, is_redirect: bool) -> None:
    """Check a host that a proxy will resolve: an address, or a name of this machine. Raises: OSError if not allowed."""
    with suppress(ValueError):
        _check_address(ip_address(host), host, is_redirect=is_redirect)
    if is_redirect and (host == "localhost" or host.endswith(".localhost")):
        raise OSError(f"a redirect leads to {host}")


def _check_address(address: Address, host: str, *, is_redirect: bool) -> None:
    """Raise OSError for an address that must not be connected to."""
    address = _unwrap_ipv4(address)
    if address.is_global and not address.is_multicast:
        return
    if is_redirect:
        raise OSError(f"a redirect leads to {host} ({address}), which is no public address")
    if address in METADATA or not any(address in network for network in OWN_NETWORKS):
        raise OSError(f"{host} ({address}) is neither a public nor a private address")


def _unwrap_ipv4(address: Address) -> Address:
    """Return the IPv4 address embedded in an IPv6 address, or the address itself."""
    if isinstance(address, IPv4Address):
        return address
    if address in NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else address)


def _find_proxy(scheme: str, host: str) -> SplitResult | None:
    """Return the proxy set by the environment (`https_proxy`, `no_proxy`)."""
    proxy = urllib.request.getproxies().get(scheme)
    if not proxy or urllib.request.proxy_bypass(host):
        return None
    return urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")


def _build_proxy_auth(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    login = f"{urllib.parse.unquote(proxy.username)}:{urllib.parse.unquote(proxy.password or '')}"
    return {"Proxy-Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"}


def _open_tunnel(channel: socket.socket, target: str, headers: dict[str, str]) -> None:
    """Ask a proxy to connect to `target`. Raises: OSError."""
    lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}", *(f"{name}: {text}" for name, text in headers.items())]
    channel.sendall("\r\n".join([*lines, "", ""]).encode())
    response = http.client.HTTPResponse(channel, method="CONNECT")
    response.begin()
    if response.status != 200:
        raise OSError(f"the proxy answered with HTTP status {response.status} {response.reason[:100]}")


@contextmanager
def _shut_down_at(channel: socket.socket, deadline: float) -> Iterator[None]:
    """Shut a connection down at the deadline. A server that sends a byte now and then never causes a timeout."""
    with channel.dup() as duplicate:  # TLS takes over the descriptor of `channel`

        def shut() -> None:
            with suppress(OSError):
                duplicate.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(max(deadline - time.monotonic(), 0), shut)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

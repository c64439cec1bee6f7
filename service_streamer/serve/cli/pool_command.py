"""``service-streamer pool``: the pools that processes of this user share on this host."""

from __future__ import annotations

import os
from typing import Any

import click

from ...errors import StreamerError
from ...options.kinds import POOL_NAME
from ...pool.control import ask_pool, await_end
from ...pool.directory import own_directory, pool_names
from ...reporting import counted


@click.group("pool")
def pool_command() -> None:
    """Look at the pools of Streamer(shared="NAME"), end them, or let a new version replace one.

    They are those of this user on this host. Exit codes: 0; 1 if there is no such pool or it does
    not answer; 2 for a wrong command line.
    """


@pool_command.command("list")
def list_pools() -> None:
    """Print the name, the process, the state, and the clients of each pool."""
    try:
        names = pool_names()
        if not names:
            click.echo(f"there are no pools in {own_directory()}", err=True)
    except OSError as error:
        raise click.ClickException(str(error)) from None
    for name in names:
        try:
            status = ask_pool(name, "status")
        except (StreamerError, OSError, ValueError) as error:
            click.echo(f"{name:20} {error}")
            continue
        click.echo(
            f"{name:20} process {status['pid']}, {status['state']}, "
            f"{counted(len(status['clients']), 'client')}, up {_duration(status['seconds'])}"
        )


@pool_command.command()
@click.argument("name")
def status(name: str) -> None:
    """Print what the pool NAME does, for whom, and what it was started with."""
    found = _asked(name, "status")
    stats = found["stats"]
    rows = [
        ("process", f"{found['pid']}, up {_duration(found['seconds'])}"),
        ("state", found["state"]),
        ("calls", stats.gist),
        *(
            (f"worker {each.number}", f"{each.state}{_on(each.device)}")
            for each in found["workers"]
        ),
        *(
            (f"client {pid}", f"{counted(calls, 'open call')}{_command(pid)}")
            for pid, calls in found["clients"]
        ),
        *found["fingerprint"].items(),
    ]
    for title, text in rows:
        click.echo(f"{title:22} {text}")


@pool_command.command()
@click.argument("name")
@click.option("--now", is_flag=True, help="Fail the calls that are open instead of finishing them.")
@click.option(
    "--timeout", default=60.0, show_default=True, metavar="SECONDS",
    type=click.FloatRange(0, 1e9),
    help="How long to wait for its end.",
)  # fmt: skip
def stop(name: str, *, now: bool, timeout: float) -> None:
    """End the pool NAME when it has finished its calls.

    Calls that come meanwhile wait. If there are clients, the next of their calls starts a new pool.
    """
    pid = _asked(name, "stop", not now)
    if not await_end(pid, timeout):
        raise click.ClickException(
            f"the pool {name!r} (process {pid}) still finishes its calls after {timeout:g} s; "
            "use --now to fail them, or wait"
        )
    click.echo(f"the pool {name!r} has ended")


@pool_command.command()
@click.argument("name")
def replace(name: str) -> None:
    """Release the name NAME, for an upgrade: the next process to ask starts a new pool.

    The old pool serves the clients that it has until they leave. Until then there are two pools,
    with the memory of both.
    """
    pid = _asked(name, "replace")
    click.echo(
        f"the pool {name!r} (process {pid}) has given up its name, and ends with its last client"
    )


def _asked(name: str, method: str, *arguments: Any) -> Any:
    try:
        POOL_NAME.check("NAME", name)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    try:
        return ask_pool(name, method, *arguments)
    except (StreamerError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    return f"{minutes} min" if minutes < 120 else f"{hours} h {minutes % 60} min"


def _on(device: Any) -> str:
    return "" if device is None else f" on {device}"


def _command(pid: int) -> str:
    """What the process is, in short."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read(200)
    except OSError:
        return ""
    words = os.fsdecode(command).replace("\0", " ").strip()
    return f" of {words[:60]}" if words else ""

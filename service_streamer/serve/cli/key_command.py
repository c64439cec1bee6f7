"""``service-streamer key``: API keys for --api-key-file."""

from __future__ import annotations

import click

from ..http.api_keys import COMPUTE, SCOPES, check_key_name, key_table, new_key


@click.group("key")
def key_command() -> None:
    """Make API keys for serve --api-key-file."""


@key_command.command()
@click.argument("name")
@click.option(
    "--scope", "scopes", multiple=True, type=click.Choice(SCOPES), default=(COMPUTE,),
    show_default=True, help="What the key is for. May be given several times.",
)  # fmt: skip
def new(name: str, scopes: tuple[str, ...]) -> None:
    """Print a new key for NAME on the standard error, and its table for the file on the output.

    The key is printed once and stored nowhere; the table has only its hash. So
    'service-streamer key new alice >> keys.toml' shows the key and adds the table.
    """
    try:
        check_key_name(name)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    key = new_key()
    note = f"Give {name} this key. It is not shown again. The output is its table."
    click.echo(f"{key}\n\n{note}\n", err=True)
    click.echo(key_table(name, key, dict.fromkeys(scopes)), nl=False)

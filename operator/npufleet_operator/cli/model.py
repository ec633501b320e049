"""`npufleet model`: what a model is and needs, before it is served; and its files brought into a cache."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from npufleet_operator.cli.model_needs import ModelNeeds, needs
from npufleet_operator.errors import InputError

MAX_CONFIG_BYTES = 4 << 20
DEVICE_GIB = (32, 64)

_uri = click.argument("uri")
_options = (
    click.option("--revision", default=None, help="Branch, tag or commit; the source's default where it is absent."),
    click.option("--endpoint", default=None, help="Mirror of the hub, or the S3 service."),
    click.option("--region", default=None, help="Region of the bucket."),
    click.option("--file", "files", multiple=True, help="Glob that narrows the weights; may be repeated."),
    click.option(
        "--credentials",
        type=click.Path(path_type=Path, file_okay=False, exists=True),
        default=None,
        help="Folder with a file token, or accessKeyId and secretAccessKey: a token on the command line would be seen.",
    ),
)


def _source_options(command: Any) -> Any:
    for option in reversed(_options):
        command = option(command)
    return command


@click.group()
def model() -> None:
    """What a model is and needs, and its files in a cache."""


@model.command()
@_uri
@_source_options
@click.option("--context", "tokens", type=click.IntRange(1, 10485760), default=32768, show_default=True, help="Tokens of KV to hold.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(uri: str, tokens: int, as_json: bool, credentials: Path | None, **source: Any) -> None:
    """Architecture, size, NPUs at each parallelism, chat template and licence of the model at URI. Only small files are read."""
    found = _run(_inspect(_settings(uri, credentials, source), credentials, tokens))
    click.echo(json.dumps(found.as_json(), indent=2) if as_json else found.as_text())


@model.command()
@_uri
@_source_options
@click.option("--cache", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder of the cache, as a pool's hostPath.")
@click.option("--namespace", default="", help="Namespace of the models that may use it; needed with --credentials.")
@click.option("--allow-pickle", is_flag=True, help="As models.allowPickle of the pool.")
def prefetch(uri: str, cache: Path, namespace: str, allow_pickle: bool, credentials: Path | None, **source: Any) -> None:
    """Bring the model at URI into the cache folder CACHE: of a node, or of a volume that is carried to a site without a network.

    Endpoint, region, files and pickles have to be those of pool and model: pods find what was fetched in the same way.
    """
    if credentials is not None and not namespace:
        raise click.ClickException("--namespace: what is fetched with credentials is kept to one namespace: name it")
    if cache.exists() and (owner := cache.stat().st_uid) != os.geteuid():
        raise click.ClickException(
            f"--cache: {cache} belongs to user {owner}, this runs as {os.geteuid()}, and pods could not use what it writes: run it as the "
            f"owner, as in setpriv --reuid {owner} --regid {owner} --clear-groups npufleet model prefetch …"
        )
    settings = _settings(uri, credentials, source).model_copy(
        update={"scope": namespace if credentials is not None else "", "allow_pickle": allow_pickle}
    )
    outcome = _run(_prefetch(settings, credentials, cache))
    size = f"{outcome.bytes} bytes in {outcome.files} files, {outcome.bytes_fetched} fetched"
    click.echo(f"{uri}@{outcome.revision}: {size}; {outcome.digest}")


def _settings(uri: str, credentials: Path | None, source: Mapping[str, Any]) -> Any:
    from npufleet_api.fetching import FetchSettings
    from npufleet_api.sources import parse_uri

    try:
        uri = str(parse_uri(uri))
    except ValueError as error:
        raise click.ClickException(f"URI: {error}") from error
    return FetchSettings(uri=uri, credentials=credentials is not None, **{**source, "files": sorted(source["files"])})


def _run(work: Any) -> Any:
    try:
        from npufleet_fetch.errors import FetchError
    except ImportError as error:
        work.close()
        raise click.ClickException("this needs npufleet_fetch: install npufleet with its extra pod") from error
    try:
        return asyncio.run(work)
    except (FetchError, InputError) as error:
        raise click.ClickException(str(error)) from error


async def _inspect(settings: Any, credentials: Path | None, tokens: int) -> ModelNeeds:
    from npufleet_fetch.opening import open_source
    from npufleet_fetch.selection import select_files
    from npufleet_fetch.transfer import with_attempts

    source = open_source(settings, "", credentials or Path())
    try:
        listing = await with_attempts(source.list)
        files = select_files(listing.files, settings.files, allow_pickle=False)
        by_name = {file.path.rpartition("/")[2]: file for file in files}

        async def read(name: str) -> dict[str, Any]:
            file = by_name.get(name)
            if file is None or file.size > MAX_CONFIG_BYTES:
                return {}
            pieces = [piece async for piece in source.read(file, 0, file.size)]
            try:
                content = json.loads(b"".join(pieces))
            except ValueError:
                return {}
            return content if isinstance(content, dict) else {}

        config, tokenizer = await with_attempts(lambda: read("config.json")), await with_attempts(lambda: read("tokenizer_config.json"))
    finally:
        await source.close()
    weights = sum(file.size for file in files if file.path.endswith((".safetensors", ".gguf")))
    template = "chat_template.jinja" in by_name or "chat_template" in tokenizer
    licence = next((name for name in by_name if name.startswith("LICENSE")), "")
    total = sum(file.size for file in files)
    return needs(config, listing.revision, weights, total, tokens, DEVICE_GIB, template=template, licence=licence)


async def _prefetch(settings: Any, credentials: Path | None, cache: Path) -> Any:
    from npufleet_fetch.fetch import Places, fetch_model
    from npufleet_fetch.meter import Meter

    return await fetch_model(settings, "", Places(cache, credentials or Path(), None), Meter())

# SPDX-License-Identifier: Apache-2.0
"""``kvgrpc healthcheck``: one question to a server's health service, for exec probes and scripts."""

from __future__ import annotations

import sys
from typing import NoReturn, cast

import click
import grpc
from grpc_health.v1 import health_pb2

from kvgrpc.cli.connection import connection_options, credentials_of
from kvgrpc.cli.reached import TLS_HINT
from kvgrpc.client.address import Address, parse_address
from kvgrpc.client.credentials import Credentials
from kvgrpc.client.default import default_address
from kvgrpc.config.places import UntrustedSocketError

NOT_SERVING = 1
WRONG = 2
NO_ANSWER = 3


@click.command()
@click.argument("name", default="readiness")
@connection_options
@click.option(
    "--timeout-ms", type=click.IntRange(min=1), default=3000, show_default=True, help="for the whole question"
)
def healthcheck(name: str, address: str | None, timeout_ms: int, **credentials: str | None) -> None:
    """Ask a server whether it serves, as probes do.

    NAME is liveness, readiness (the default) or a service's full name.

    Exit codes: 0 it serves; 1 it answers that it does not (draining, or a copy that stands still); 2 the question is
    wrong; 3 no answer in time.
    """
    try:
        server = parse_address(address or default_address())
        channel = _channel(server, credentials_of(credentials))
    except (UntrustedSocketError, ValueError) as error:
        _fail(str(error), WRONG)
    try:
        answer = _ask(channel, server, name, timeout_ms / 1000)
    except UnicodeEncodeError:
        _fail("NAME is no UTF-8", WRONG)
    word = health_pb2.HealthCheckResponse.ServingStatus.Name(answer)
    if answer != health_pb2.HealthCheckResponse.SERVING:
        _fail(f"{server.target}: {name}: {word}", NOT_SERVING)
    click.echo(word)


def _channel(server: Address, credentials: Credentials) -> grpc.Channel:
    """No token: health asks for none."""
    options: list[tuple[str, str | int]] = [("grpc.enable_http_proxy", 0)]
    if not credentials.uses_tls(server):
        return grpc.insecure_channel(server.target, options=options)
    if credentials.server_name:
        options.append(("grpc.ssl_target_name_override", credentials.server_name))
    return grpc.secure_channel(server.target, credentials.channel_credentials(), options=options)


def _ask(
    channel: grpc.Channel, server: Address, name: str, timeout_s: float
) -> health_pb2.HealthCheckResponse.ServingStatus:
    with channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            return check(health_pb2.HealthCheckRequest(service=name), timeout=timeout_s).status
        except grpc.RpcError as error:
            call = cast(grpc.Call, error)  # gRPC raises the call itself
            if call.code() is grpc.StatusCode.NOT_FOUND:
                _fail(f"{server.target}: {call.details()}", WRONG)
            tls = "" if server.is_unix else f".{TLS_HINT}"
            _fail(f"no answer from {server.target}: {call.code().name}: {call.details()}{tls}", NO_ANSWER)


def _fail(text: str, exit_code: int) -> NoReturn:
    click.echo(f"Error: {text}", err=True)
    sys.exit(exit_code)

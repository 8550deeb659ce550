"""A worker over gRPC: a thin typed client. Deadlines, retries of reads; no policy."""

import asyncio
from collections import abc
from typing import Protocol

from quire.client.channel import RETRIES, OrderedStream, RetryPolicy, decode_error, open_channel, unary
from quire.client.credentials import NO_CREDENTIALS, Credentials
from quire.client.errors import ProtocolViolation
from quire.compute.v1 import worker_service_pb2 as pb
from quire.compute.v1 import worker_service_pb2_grpc

# A grammar compiles in 5 s or is refused, and so is a mask that takes 1 s; others may be before it.
_GRAMMAR_TIMEOUT_S = 60.0
# An adapter is read from a disk, and compared with the model in forwards between the steps.
_ADAPTER_TIMEOUT_S = 600.0


class StepAnswer(Protocol):
    """A step that was sent. Raises QuireError and nothing else."""

    async def result(self) -> pb.RunStepResponse:
        """Wait for the answer and return it. Further calls return the same answer."""


class WorkerApi(Protocol):
    """The calls of a worker that the engine needs. Every method raises QuireError and nothing else."""

    async def get_model(self) -> pb.GetModelResponse:
        """Return the worker's model and pool."""

    async def check_grammar(self, grammar: pb.Grammar, output_token_ids: abc.Sequence[int] = ()) -> float:
        """Compile a grammar and make the mask behind these generated tokens, so that no step waits for either.

        Returns the seconds of a processor that the mask took.
        """

    async def load_adapter(self, name: str, path: str) -> pb.LoadAdapterResponse:
        """Load an adapter from a folder of the worker's machine."""

    async def unload_adapter(self, name: str) -> bool:
        """Unload an adapter; return False if there was none of this name."""

    async def run(self, request: pb.RunStepRequest) -> StepAnswer:
        """Send a step; does not wait for its answer. Steps are run and answered in the order in which they are sent."""

    async def hang_up(self) -> None:
        """Give up steps that wait for an answer. A late answer is never taken for the answer to a later step."""

    async def close(self) -> None:
        """Give up all connections."""


class _Sent:
    """StepAnswer of a step on the stream."""

    __slots__ = ("_future",)

    def __init__(self, future: asyncio.Future[pb.RunStepsResponse]) -> None:
        self._future = future

    async def result(self) -> pb.RunStepResponse:
        answer = await self._future
        match answer.WhichOneof("answer"):
            case "step":
                return answer.step
            case "error":
                raise decode_error(answer.error)
            case _:
                raise ProtocolViolation("an empty answer to a step")


class WorkerClient:
    """WorkerApi over a channel, and the calls that inspect. Make it inside a running event loop."""

    def __init__(
        self,
        address: str,
        *,
        credentials: Credentials = NO_CREDENTIALS,
        timeout_s: float = 10.0,
        step_timeout_s: float = 300.0,
        retry: RetryPolicy = RETRIES,
    ) -> None:
        """address is "unix:/path" or "host:port"; timeout_s is the deadline of each attempt of a call.

        step_timeout_s is the deadline of a step, the time it waits for others included; the first step of a worker may
        compile kernels.
        """
        self._timeout_s = timeout_s
        self._retry = retry
        self._channel = open_channel(address, credentials)
        self._stub = worker_service_pb2_grpc.WorkerServiceStub(self._channel)
        self._steps: OrderedStream[pb.RunStepsRequest, pb.RunStepsResponse] = OrderedStream(
            self._stub.RunSteps, timeout_s=step_timeout_s
        )

    async def get_model(self) -> pb.GetModelResponse:
        """See WorkerService.GetModel. Raises Unavailable."""
        return await unary(self._stub.GetModel, pb.GetModelRequest(), timeout_s=self._timeout_s, policy=self._retry)

    async def check_grammar(self, grammar: pb.Grammar, output_token_ids: abc.Sequence[int] = ()) -> float:
        """See WorkerService.CheckGrammar. Raises InvalidRequest, OutOfRoom, Unavailable."""
        request = pb.CheckGrammarRequest(grammar=grammar, output_token_ids=output_token_ids)
        response = await unary(self._stub.CheckGrammar, request, timeout_s=_GRAMMAR_TIMEOUT_S, policy=self._retry)
        return response.mask_time.seconds + response.mask_time.nanos / 1e9

    async def run(self, request: pb.RunStepRequest) -> StepAnswer:
        """See WorkerService.RunStep; goes over the stream, never repeated.

        The answer raises StepRefused, StepFailed, EpochChanged, LeaseLost, InvalidRequest or Unavailable.
        """
        return _Sent(await self._steps.send(pb.RunStepsRequest(step=request)))

    async def get_statistics(self) -> pb.GetStatisticsResponse:
        """See WorkerService.GetStatistics."""
        request = pb.GetStatisticsRequest()
        return await unary(self._stub.GetStatistics, request, timeout_s=self._timeout_s, policy=self._retry)

    async def checksum_blocks(self, block_ids: list[int]) -> pb.ChecksumBlocksResponse:
        """See WorkerService.ChecksumBlocks. Raises InvalidRequest."""
        request = pb.ChecksumBlocksRequest(block_ids=block_ids)
        return await unary(self._stub.ChecksumBlocks, request, timeout_s=self._timeout_s, policy=self._retry)

    async def load_adapter(self, name: str, path: str) -> pb.LoadAdapterResponse:
        """See WorkerService.LoadAdapter. Raises InvalidRequest, AccessDenied, RequestFailed, Unavailable."""
        request = pb.LoadAdapterRequest(name=name, path=path)
        return await unary(self._stub.LoadAdapter, request, timeout_s=_ADAPTER_TIMEOUT_S, policy=self._retry)

    async def unload_adapter(self, name: str) -> bool:
        """See WorkerService.UnloadAdapter; return False if there was none. Raises as load_adapter does."""
        request = pb.UnloadAdapterRequest(name=name)
        response = await unary(self._stub.UnloadAdapter, request, timeout_s=_ADAPTER_TIMEOUT_S, policy=self._retry)
        return response.unloaded

    async def hang_up(self) -> None:
        """End the stream of steps; steps that wait get Unavailable. The next step opens another one."""
        await self._steps.close()

    async def close(self) -> None:
        """Give up the stream and the channel."""
        await self._steps.close()
        await self._channel.close()

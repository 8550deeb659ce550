"""WorkerService: every handler decodes, calls, encodes. Nothing here waits for the device but the caller it answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration

from quire.cache.v1 import attach_pb2
from quire.compute.v1 import worker_service_pb2, worker_service_pb2_grpc
from quire.serving.errors import answering, to_message
from quire.worker.disk.disk_tier import DiskCounters, DiskTier
from quire.worker.grant.errors import Reason, Refused, invalid
from quire.worker.memory.step_batch import max_logits
from quire.worker.run.executor import Outcome, StepResult
from quire.worker.service.adapter_loading import AdapterLoader
from quire.worker.service.attachment import Attachment
from quire.worker.service.description import ModelDescription
from quire.worker.service.steps import EndedStep, Steps

Context = grpc.aio.ServicerContext[Any, Any]
Accepted = asyncio.Queue[asyncio.Future[EndedStep] | None]
"""Steps of one stream in the order of their answers; None ends it."""

MAX_CHECKSUM_BLOCKS = 10_000
MAX_STEPS_WAITING = 64
"""Steps of one stream that may wait for their answers before the next is read."""


refusing = answering(Refused, lambda refused: refused.status)


class WorkerServicer(worker_service_pb2_grpc.WorkerServiceServicer):
    """Steps behind gRPC."""

    def __init__(
        self,
        steps: Steps,
        attachment: Attachment,
        model: ModelDescription,
        geometry: attach_pb2.PoolGeometry,
        adapters: AdapterLoader,
        disk: DiskTier | None = None,
    ) -> None:
        self._steps = steps
        self._disk = disk
        self._adapters = adapters
        self._attachment = attachment
        self._model = model
        self._geometry = geometry
        self._owed: Counter[Accepted] = Counter()
        self._nothing_owed = asyncio.Event()
        self._nothing_owed.set()

    async def drain(self) -> None:
        """Refuses new steps; returns when those accepted have ended and streams have sent their answers."""
        await self._steps.drain()
        await self._nothing_owed.wait()

    @refusing
    async def GetModel(  # noqa: N802
        self, request: worker_service_pb2.GetModelRequest, context: Context
    ) -> worker_service_pb2.GetModelResponse:
        return worker_service_pb2.GetModelResponse(
            model=self._model.name,
            architecture=self._model.architecture,
            tokenizer=self._model.tokenizer,
            end_token_ids=self._model.end_token_ids,
            dtype=self._model.dtype,
            kv_dtype=self._model.kv_dtype,
            device=self._model.device,
            pool=self._steps.gate.pool,
            epoch=self._steps.gate.epoch,
            geometry=self._geometry,
            max_step_tokens=self._steps.limits.max_step_tokens,
            max_logprob_count=self._steps.limits.max_logprobs,
            adapters=[
                worker_service_pb2.Adapter(name=name, identity=identity)
                for name, identity in sorted(self._steps.adapters.names.items())
            ],
            max_adapter_count=self._adapters.max_adapters,
            max_sampled_token_count=max_logits(self._geometry.max_sequence_count),
        )

    @refusing
    async def RunStep(  # noqa: N802
        self, request: worker_service_pb2.RunStepRequest, context: Context
    ) -> worker_service_pb2.RunStepResponse:
        followed = await self._steps.follow_grammars(request)
        return self._answer_to(await self._steps.accept(request, followed))

    @refusing
    async def CheckGrammar(  # noqa: N802
        self, request: worker_service_pb2.CheckGrammarRequest, context: Context
    ) -> worker_service_pb2.CheckGrammarResponse:
        return worker_service_pb2.CheckGrammarResponse(mask_time=duration(await self._steps.check_grammar(request)))

    async def RunSteps(  # noqa: N802
        self, request_iterator: AsyncIterator[worker_service_pb2.RunStepsRequest], context: Context
    ) -> AsyncIterator[worker_service_pb2.RunStepsResponse]:
        """Reads ahead: a step is accepted as soon as it is read, and answered when it has ended.

        The answer's metadata is sent when the first step has been read: a client that waits for it can then send the
        next one on another stream.
        """
        accepted: Accepted = asyncio.Queue(MAX_STEPS_WAITING)
        reader = asyncio.create_task(self._accept_all(request_iterator, accepted))
        try:
            ended = await accepted.get()
            await context.send_initial_metadata(())
            while ended is not None:
                try:
                    answer = worker_service_pb2.RunStepsResponse(step=self._answer_to(await ended))
                except Refused as refused:
                    answer = worker_service_pb2.RunStepsResponse(error=to_message(refused.status))
                yield answer
                self._owe(accepted, -1)
                ended = await accepted.get()
            await reader
        finally:
            reader.cancel()
            self._owe(accepted, -self._owed[accepted])
            del self._owed[accepted]

    def _answer_to(self, ended: EndedStep) -> worker_service_pb2.RunStepResponse:
        """The answer to a step that has ended. Raises Refused if it failed."""
        answer = encode_ended(ended)
        if self._disk is not None and (reads := self._disk.take_reads())[0]:
            answer.disk_read_block_count = reads[0]
            answer.disk_read_time.CopyFrom(duration(reads[1]))
        return answer

    async def _accept_all(
        self,
        requests: AsyncIterator[worker_service_pb2.RunStepsRequest],
        accepted: Accepted,
    ) -> None:
        """Ends the queue with None, but not when it is cancelled: then nothing reads a full queue."""
        try:
            async for request in requests:
                try:
                    followed = await self._steps.follow_grammars(request.step)
                    ended = self._steps.accept(request.step, followed)
                except Refused as refused:
                    ended = asyncio.get_running_loop().create_future()
                    # Its traceback holds the request, and would for as long as the answer waits.
                    ended.set_exception(refused.with_traceback(None))
                    ended.exception()  # seen, whether or not the stream lives long enough to say it
                del request
                self._owe(accepted, 1)
                await accepted.put(ended)
        except Exception:
            await accepted.put(None)
            raise
        await accepted.put(None)

    def _owe(self, stream: Accepted, change: int) -> None:
        """Counts the answers that a stream owes."""
        self._owed[stream] += change
        if self._owed.total():
            self._nothing_owed.clear()
        else:
            self._nothing_owed.set()

    @refusing
    async def GetStatistics(  # noqa: N802
        self, request: worker_service_pb2.GetStatisticsRequest, context: Context
    ) -> worker_service_pb2.GetStatisticsResponse:
        gate = self._steps.gate.statistics()
        counters = self._steps.counters
        of_disk = DiskCounters() if self._disk is None else self._disk.counters
        return worker_service_pb2.GetStatisticsResponse(
            epoch=gate.epoch,
            term=gate.term,
            attached=self._attachment.is_attached,
            computed_step_count=counters.computed,
            failed_step_count=counters.failed,
            skipped_step_count=counters.skipped,
            refusal_counts={reason.value: count for reason, count in counters.refusals.items()},
            computed_token_count=counters.computed_tokens,
            sampled_token_count=counters.sampled_tokens,
            copied_block_count=counters.copied_blocks,
            open_lease_count=gate.num_open_leases,
            sequence_count=self._steps.num_sequences(),
            step_in_flight_count=self._steps.num_in_flight,
            unacknowledged_report_count=len(self._steps.reports),
            forward_time=duration(counters.forward_s),
            offloaded_block_count=counters.offloaded_blocks,
            restored_block_count=counters.restored_blocks,
            host_copy_time=duration(counters.host_copy_s),
            disk_read_block_count=of_disk.read,
            disk_read_time=duration(of_disk.read_s),
            disk_write_block_count=of_disk.written,
            disk_write_time=duration(of_disk.write_s),
            step_parts=[
                worker_service_pb2.StepPart(part=mode.part, mode=mode.how, degraded_reason=mode.degraded)
                for mode in self._model.modes.all()
            ],
        )

    @refusing
    async def ChecksumBlocks(  # noqa: N802
        self, request: worker_service_pb2.ChecksumBlocksRequest, context: Context
    ) -> worker_service_pb2.ChecksumBlocksResponse:
        check_block_ids(request.block_ids, self._geometry.block_count)
        epoch, block_ids = self._steps.gate.epoch, list(request.block_ids)
        checksums = await self._steps.checksum_blocks(block_ids, block_bytes=self._geometry.block_bytes)
        return worker_service_pb2.ChecksumBlocksResponse(checksums=checksums, epoch=epoch)

    @refusing
    async def LoadAdapter(  # noqa: N802
        self, request: worker_service_pb2.LoadAdapterRequest, context: Context
    ) -> worker_service_pb2.LoadAdapterResponse:
        loaded = await self._adapters.load(request.name, request.path)
        return worker_service_pb2.LoadAdapterResponse(
            adapter=worker_service_pb2.Adapter(name=request.name, identity=loaded.identity),
            loaded=loaded.is_new,
            evicted_names=loaded.evicted,
        )

    @refusing
    async def UnloadAdapter(  # noqa: N802
        self, request: worker_service_pb2.UnloadAdapterRequest, context: Context
    ) -> worker_service_pb2.UnloadAdapterResponse:
        return worker_service_pb2.UnloadAdapterResponse(unloaded=await self._adapters.unload(request.name))


def check_block_ids(block_ids: Sequence[int], num_blocks: int) -> None:
    """Raises Refused (INVALID_ARGUMENT, BLOCK_OUT_OF_RANGE)."""
    if len(block_ids) > MAX_CHECKSUM_BLOCKS:
        raise invalid("block_ids", f"{len(block_ids)} entries", f"at most {MAX_CHECKSUM_BLOCKS} entries")
    limit = num_blocks - 1
    for block_id in block_ids:
        if not 0 <= block_id <= limit:
            message = f"block {block_id} is not in the pool, 0 to {limit}"
            raise Refused(Reason.BLOCK_OUT_OF_RANGE, message, value=block_id, limit=limit)


def encode_ended(ended: EndedStep) -> worker_service_pb2.RunStepResponse:
    """The answer to a step that was computed or skipped. Raises Refused if it failed."""
    result = ended.result
    refuse_failed(result)
    return worker_service_pb2.RunStepResponse(
        step_number=result.step_number,
        sequence_ids=result.sampled_ids,
        sampled_token_ids=result.sampled_tokens,
        sampled_token_counts=result.sampled_counts,
        logprobs=[
            worker_service_pb2.TokenLogprobs(
                sequence_id=entry.seq_id,
                sampled_logprob=entry.sampled,
                top_token_ids=entry.top_token_ids,
                top_logprobs=entry.top,
            )
            for entry in result.logprobs
        ],
        prompt_logprobs=[
            worker_service_pb2.PromptLogprobs(
                sequence_id=entry.seq_id,
                top_count=entry.num_top,
                logprobs=entry.logprobs,
                top_token_ids=entry.top_token_ids,
                top_logprobs=entry.top,
            )
            for entry in result.prompt_logprobs
        ],
        timings=worker_service_pb2.StepTimings(
            queue=duration(ended.queue_s),
            prepare=duration(result.prepare_s),
            forward=duration(result.forward_s),
            sample=duration(result.sample_s),
            offload=duration(result.host.offload_s) if result.host.num_offloaded else None,
            restore=duration(result.host.restore_s) if result.host.num_restored else None,
        ),
        offloaded_block_count=result.host.num_offloaded,
        restored_block_count=result.host.num_restored,
        copied_block_count=result.num_copied,
        grammar_failures=[
            worker_service_pb2.GrammarFailure(sequence_id=failure.seq_id, message=failure.message)
            for failure in result.grammar_failures
        ],
        late_sequence_ids=result.late_ids,
    )


def refuse_failed(result: StepResult) -> None:
    """Raises Refused (STEP_FAILED, PRIOR_STEP_FAILED)."""
    step_number = result.step_number
    if result.outcome is Outcome.FAILED:
        message = f"the model failed on step {step_number}; nothing of it was computed"
        raise Refused(Reason.STEP_FAILED, message, step_number=step_number)
    if result.outcome is Outcome.PRIOR_FAILED:
        message = f"step {step_number} was planned before step {result.failed_step} was known to have computed nothing"
        raise Refused(Reason.PRIOR_STEP_FAILED, message, step_number=step_number, failed_step_number=result.failed_step)


def duration(seconds: float) -> Duration:
    message = Duration()
    message.FromNanoseconds(int(seconds * 1e9))
    return message

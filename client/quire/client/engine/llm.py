"""An engine for scripts and notebooks: plain calls, and a thread that runs the event loop."""

import asyncio
import queue
import threading
import weakref
from collections import abc
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from quire.client.credentials import NO_CREDENTIALS, Credentials
from quire.client.engine.engine import Engine, EngineOptions
from quire.client.engine.outputs import BeamCompletion, Completion
from quire.client.engine.requests import Prompt
from quire.client.engine.sampling import SamplingParams
from quire.client.engine.scheduling.beam_search import BeamSearchParams
from quire.client.errors import EngineStopped, Unavailable

Answer = TypeVar("Answer")


class _LoopThread:
    """An event loop in a thread of its own, and the engine in it."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self._loop = asyncio.new_event_loop()
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=_run_forever, args=(self._loop,), name="quire-llm", daemon=True)
        self._thread.start()

    def run(self, coroutine: abc.Coroutine[Any, Any, Answer]) -> Answer:
        """Return what a coroutine returns; Ctrl-C cancels it."""
        # By a queue, which is C code: Ctrl-C in the midst of concurrent.futures.Future.result can leave its lock taken.
        ended: queue.SimpleQueue[asyncio.Task[Answer]] = queue.SimpleQueue()
        begun: list[asyncio.Task[Answer]] = []

        def begin() -> None:
            begun.append(self._loop.create_task(coroutine))
            begun[0].add_done_callback(ended.put)

        def cancel() -> None:
            for task in begun:
                task.cancel()

        try:
            self._loop.call_soon_threadsafe(begin)
            task = ended.get()
        except BaseException:
            self._loop.call_soon_threadsafe(cancel)
            raise
        return task.result()

    def close(self) -> None:
        """Close the engine and end the thread. Doing it twice is fine."""
        with self._closing:
            if self._loop.is_closed():
                return
            try:
                if self.engine is not None:
                    self.run(self.engine.close())
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped, then cancel the tasks that are left and close it.

    Not asyncio.run: it would start a thread to end the loop's executor, which Python 3.12 refuses when a program ends.
    """
    loop.run_forever()
    loop.run_until_complete(_cancel_others())
    loop.close()


async def _cancel_others() -> None:
    """Cancel the loop's other tasks, and wait until they have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class LLM:
    """Generates text over a cachemgr and a worker; each call waits for its answer.

        with LLM() as llm:
            [completion] = llm.generate("Once upon a time", max_tokens=64)

    Its threads may call generate at the same time: the engine batches all requests. Without close() the lease is given
    back when the object is collected or the program ends.
    """

    def __init__(
        self,
        cachemgr: str | None = None,
        *,
        worker: str | None = None,
        credentials: Credentials = NO_CREDENTIALS,
        **options: Unpack[EngineOptions],
    ) -> None:
        """Take a lease and begin. Arguments and errors are those of Engine.connect and Engine.start."""
        self._thread = _LoopThread()
        self._close = weakref.finalize(self, self._thread.close)

        async def start() -> None:
            self._thread.engine = Engine.connect(cachemgr, worker=worker, credentials=credentials, **options)
            await self._thread.engine.start()

        try:
            self._thread.run(start())
        except Unavailable as error:
            self.close()
            raise error.with_traceback(None) from None  # the calls within say nothing that its message does not say
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Prompt | abc.Iterable[Prompt],
        params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
        **fields: Any,
    ) -> list[Completion]:
        """Return all samples of all prompts, in the prompts' order. Arguments and errors are those of Engine.complete.

        Ctrl-C cancels these prompts and raises KeyboardInterrupt; the next call works.
        """
        return self._thread.run(self._engine().complete(prompts, params, **fields))

    def beam_search(
        self,
        prompts: Prompt | abc.Iterable[Prompt],
        params: BeamSearchParams | abc.Sequence[BeamSearchParams] | None = None,
        **fields: Any,
    ) -> list[BeamCompletion]:
        """Return the most probable texts behind all prompts. Arguments and errors are those of Engine.beam_search."""
        return self._thread.run(self._engine().beam_search(prompts, params, **fields))

    def _engine(self) -> Engine:
        engine = self._thread.engine
        if engine is None or not self._close.alive:
            raise EngineStopped("the engine is closed")
        return engine

    def close(self) -> None:
        """Give the lease back and end the thread. Doing it twice is fine."""
        self._close()

    def __enter__(self) -> Self:
        """Return itself; it has begun."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

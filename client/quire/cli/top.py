"""`quire top`: a cachemgr's pools, live. top_model has the state of pools and user, top_view the screen.

Three tasks: one requests statistics repeatedly, one follows the blocks of the selected pool, and the main one draws.
A key has its effect at once, on the known state.
"""

import asyncio
import contextlib
import os
import signal
import sys
import termios
import time
import tty
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

from rich.console import Console
from rich.live import Live

from quire.cache.v1 import cache_service_pb2 as pb
from quire.cache.v1 import cache_service_pb2_grpc
from quire.cli.snapshot import MAX_LISTED_BLOCKS, UnreachableError, answering, check_reachable, describe_trouble
from quire.cli.top_model import Action, BlockBook, KeyDecoder, Look, Place, Tab, Trend
from quire.cli.top_view import Shown, TopScreen, list_height
from quire.client.channel import answers, open_channel, unary
from quire.client.credentials import NO_CREDENTIALS, Credentials
from quire.client.errors import LeaseLost, NotFound, QuireError

Response = TypeVar("Response")

PAGE_SIZE = 500
"""The page size of each list."""
_BLOCK_PAGE_SIZE = 10_000
_SCAN_PAUSE_S = 0.1
_RETRY_PAUSE_S = 0.5
_TIMEOUT_S = 5.0
_ESCAPE_TIMEOUT_S = 0.05
# A look is shown as old from this age on.
_OLD_S = 3.0


def run_top(
    cachemgr: str, pool: str, *, once: bool, interval_s: float, credentials: Credentials = NO_CREDENTIALS
) -> None:
    """The screen until a key or a signal ends it; one frame, printed, if `once` or without a terminal.

    Raises UnreachableError if cachemgr does not answer at the start, or has no such pool; QuireError.
    """
    console = Console(highlight=False)
    if once or not console.is_terminal or console.is_dumb_terminal:
        shown = asyncio.run(look_once(cachemgr, pool, interval_s=interval_s, credentials=credentials))
        console.print(TopScreen(shown, height=None))
        return
    with contextlib.suppress(KeyboardInterrupt):  # one way to end it
        asyncio.run(_run_live(console, cachemgr, pool, interval_s=interval_s, credentials=credentials))


async def look_once(
    cachemgr: str, pool: str, *, interval_s: float, num_looks: int = 2, credentials: Credentials = NO_CREDENTIALS
) -> Shown:
    """The state for one frame: several looks, so that there are rates, then the blocks. Raises as run_top."""
    source = await _reach(cachemgr, pool, credentials)
    try:
        top = _Top(source, Place(pool=pool))
        with answering(cachemgr):
            await top.ask()
            for _ in range(num_looks - 1):
                await asyncio.sleep(interval_s)
                await top.ask()
            if top.book is not None:
                await _read_blocks(source, top.look.pool, top.book)
        return top.shown()
    finally:
        await source.close()


async def _read_blocks(source: "_Source", pool: str, book: BlockBook) -> None:
    """All of them, or those that come in 5 s: the frame says if they are not all."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_TIMEOUT_S), contextlib.aclosing(source.follow(pool, book)) as updates:
            async for _ in updates:
                if book.is_whole:
                    return


async def _run_live(console: Console, cachemgr: str, pool: str, *, interval_s: float, credentials: Credentials) -> None:
    source = await _reach(cachemgr, pool, credentials)
    try:
        top = _Top(source, Place(pool=pool))
        with answering(cachemgr):
            await top.ask()
        await _Screen(top, console, interval_s).run()
    finally:
        await source.close()


async def _reach(cachemgr: str, pool: str, credentials: Credentials) -> "_Source":
    names = sorted(found.name for found in await check_reachable(cachemgr, credentials))
    if pool and pool not in names:
        have = ", ".join(names) or "none"
        raise UnreachableError(f"the cachemgr at {cachemgr} has no pool {pool!r}; it has: {have}.")
    return _Source(cachemgr, credentials)


class _Source:
    """The requests to cachemgr. Each is made once: the next look is the retry."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self.address = address
        self._channel = open_channel(address, credentials)
        self._stub = cache_service_pb2_grpc.CacheServiceStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    async def look(self, place: Place, known: Look) -> Look:
        """A look at the place's pool, or the first. Raises QuireError."""
        listed, counted = await asyncio.gather(
            self._ask(self._stub.ListPools, pb.ListPoolsRequest(page_size=PAGE_SIZE)),
            self._ask(self._stub.GetStatistics, pb.GetStatisticsRequest()),
        )
        pools = tuple(listed.pools)
        statistics = {each.pool: each for each in counted.pools}
        names = [pool.name for pool in pools]
        name = place.pool if place.pool in names else min(names, default="")
        look = Look(time.monotonic(), pools, statistics, name)
        try:
            return await self._look_into(look, place, known) if name else look
        except NotFound:  # gone since it was listed
            return look

    async def _look_into(self, look: Look, place: Place, known: Look) -> Look:
        # A filter that is a tenant's whole name is for cachemgr; others choose from the page.
        tenant = place.filter if place.filter in {each.name for each in known.tenants if each.name} else None
        leases, sequences, tenants = await asyncio.gather(
            self._ask(self._stub.ListLeases, pb.ListLeasesRequest(pool=look.pool, page_size=PAGE_SIZE, tenant=tenant)),
            self._ask(
                self._stub.ListSequences, pb.ListSequencesRequest(pool=look.pool, page_size=PAGE_SIZE, tenant=tenant)
            ),
            self._tenants(look.pool),
        )
        pages: dict[Tab, Any] = {Tab.LEASES: leases, Tab.SEQUENCES: sequences, Tab.TENANTS: tenants}
        return Look(
            look.at_s,
            look.pools,
            look.statistics,
            look.pool,
            tuple(leases.leases),
            tuple(sequences.sequences),
            tuple(tenants.tenants),
            frozenset(tab for tab, page in pages.items() if page.next_page_token),
            await self._sequence(place, sequences.sequences),
        )

    async def _tenants(self, pool: str) -> pb.ListTenantsResponse:
        try:
            return await self._ask(self._stub.ListTenants, pb.ListTenantsRequest(pool=pool, page_size=PAGE_SIZE))
        except QuireError as error:
            if error.reason != "UNIMPLEMENTED":  # a cachemgr that has none
                raise
            return pb.ListTenantsResponse()

    async def _sequence(self, place: Place, listed: Any) -> pb.Sequence | None:
        """The sequence that is looked at: with its block table if cachemgr takes the beginning of a lease's id."""
        if place.opened is None:
            return None
        lease_id_prefix, sequence_id = place.opened
        request = pb.GetSequenceRequest(lease_id=lease_id_prefix, sequence_id=sequence_id)
        try:
            return (await self._ask(self._stub.GetSequence, request)).sequence
        except (LeaseLost, NotFound):
            found = (each for each in listed if (each.lease_id_prefix, each.sequence_id) == place.opened)
            return next(found, None)

    async def follow(self, pool: str, book: BlockBook) -> AsyncGenerator[None, None]:
        """Keeps a book; yields after each change of it. Ends never, but for QuireError."""
        updates = self._watch if len(book.kinds) <= MAX_LISTED_BLOCKS else self._scan
        async with contextlib.aclosing(updates(pool, book)) as changes:
            async for _ in changes:
                yield

    async def _watch(self, pool: str, book: BlockBook) -> AsyncGenerator[None, None]:
        async with contextlib.aclosing(answers(self._stub.WatchBlocks(pb.WatchBlocksRequest(pool=pool)))) as changes:
            async for answer in changes:
                book.apply(answer)
                yield

    async def _scan(self, pool: str, book: BlockBook) -> AsyncGenerator[None, None]:
        """Reads a page at a time, in a loop: for a big pool a watch would send more than a map can show."""
        request = pb.ListBlocksRequest(pool=pool, page_size=_BLOCK_PAGE_SIZE)
        while True:
            page = await self._ask(self._stub.ListBlocks, request)
            book.apply_page(page.blocks, is_last=not page.next_page_token)
            yield
            request.page_token = page.next_page_token
            await asyncio.sleep(_SCAN_PAUSE_S)

    async def _ask(self, method: Callable[..., Awaitable[Response]], request: Any) -> Response:
        return await unary(method, request, timeout_s=_TIMEOUT_S)


class _Top:
    """The known state, and the user's position. A request that fails leaves the last look unchanged."""

    def __init__(self, source: _Source, place: Place) -> None:
        self.place = place
        self.look = Look(time.monotonic())
        self.book: BlockBook | None = None
        self.error: QuireError | None = None
        self._source = source
        self._trends: dict[str, Trend] = {}

    async def ask(self) -> None:
        """A new look. Raises QuireError."""
        self.look = await self._source.look(self.place, self.look)
        for name, statistics in self.look.statistics.items():
            self._trends.setdefault(name, Trend()).add(self.look.at_s, statistics)
        chosen = self.look.chosen
        num_blocks = 0 if chosen is None else chosen.geometry.block_count - 1
        if self.book is None or len(self.book.kinds) != num_blocks:
            self.book = BlockBook(num_blocks) if num_blocks else None
        self.error = None

    async def ask_forever(self, interval_s: float, asked: asyncio.Event) -> None:
        """A look every interval_s, and when asked."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await asked.wait()
            asked.clear()
            try:
                await self.ask()
            except QuireError as error:
                self.error = error

    async def follow_forever(self) -> None:
        """Keeps the book of the pool that is looked at, whichever it is."""
        while True:
            pool, book = self.look.pool, self.book
            if book is not None:
                with contextlib.suppress(QuireError):
                    async with contextlib.aclosing(self._source.follow(pool, book)) as updates:
                        async for _ in updates:
                            if (pool, book) != (self.look.pool, self.book):
                                break
            await asyncio.sleep(_RETRY_PAUSE_S)

    def shown(self) -> Shown:
        """The content of a frame, now."""
        trend = self._trends.get(self.look.pool, Trend())
        return Shown(
            address=self._source.address,
            look=self.look,
            place=self.place,
            clock=time.strftime("%H:%M:%S"),
            now_s=time.time(),
            trouble=self._trouble(),
            rates=trend.rates(),
            book=self.book,
        )

    def _trouble(self) -> str:
        age_s = time.monotonic() - self.look.at_s
        if self.error is None and age_s < _OLD_S:
            return ""
        return describe_trouble(self._source.address, self.error, age_s)


class _Screen:
    """The terminal from the first frame to the last."""

    def __init__(self, top: _Top, console: Console, interval_s: float) -> None:
        self._top = top
        self._console = console
        self._interval_s = interval_s
        self._live = Live(
            console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._keyboard = Keyboard(sys.stdin.fileno(), self._press, self._end)
        self._changed = asyncio.Event()
        self._asked = asyncio.Event()
        self._is_ended = False
        self._status = 0

    async def run(self) -> None:
        """Until a key or a signal ends it. Raises SystemExit for SIGTERM and SIGHUP, when all is put back."""
        tasks = [
            asyncio.create_task(self._top.ask_forever(self._interval_s, self._asked)),
            asyncio.create_task(self._top.follow_forever()),
        ]
        for task in tasks:
            task.add_done_callback(lambda _: self._changed.set())
        try:
            with self._signals(), self._live, self._keyboard:
                while not self._is_ended:
                    self._draw()
                    for task in tasks:
                        if task.done():
                            task.result()
                    await self._wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._status:
            raise SystemExit(self._status)

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._interval_s):
                await self._changed.wait()
        self._changed.clear()

    def _draw(self) -> None:
        self._live.update(TopScreen(self._top.shown(), height=self._console.height), refresh=True)

    def _press(self, key: str) -> None:
        size = self._console.size
        page = list_height(self._top.shown(), width=size.width, height=size.height)
        match self._top.place.press(key, self._top.look, page=page):
            case Action.QUIT:
                self._end()
            case Action.ASK:
                self._asked.set()
        self._changed.set()

    def _end(self, status: int = 0) -> None:
        self._is_ended, self._status = True, status
        self._changed.set()

    def _stop(self) -> None:
        """Ctrl-Z: the shell gets its terminal back, until the process is continued."""
        self._live.stop()
        self._keyboard.give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._keyboard.take()
        self._live.start()
        self._changed.set()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGWINCH, self._changed.set)
        loop.add_signal_handler(signal.SIGTSTP, self._stop)
        endings = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
        for number in endings:
            loop.add_signal_handler(number, self._end, 128 + number)
        try:
            yield
        finally:
            for number in (signal.SIGWINCH, signal.SIGTSTP, *endings):
                loop.remove_signal_handler(number)


class Keyboard:
    """Within the block, call on_key for each key of the terminal, without echo; call on_end when it is closed.

    Ctrl-C and Ctrl-Z stay signals. Without a terminal there are no keys. The terminal is left as it was found.
    """

    def __init__(self, fd: int, on_key: Callable[[str], None], on_end: Callable[[], None]) -> None:
        """fd is the terminal's; keys are read on the running loop."""
        self._fd = fd
        self._on_key = on_key
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._decoder = KeyDecoder()
        self._late: asyncio.TimerHandle | None = None
        self._before = termios.tcgetattr(fd) if os.isatty(fd) else None

    def __enter__(self) -> Self:
        self.take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back()

    def take(self) -> None:
        """Take the keys of the terminal."""
        if self._before is not None:
            tty.setcbreak(self._fd)
            self._loop.add_reader(self._fd, self._read)

    def give_back(self) -> None:
        """Return the keys, and restore the terminal."""
        if self._before is not None:
            self._loop.remove_reader(self._fd)
            with contextlib.suppress(termios.error):  # it has gone
                termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def _read(self) -> None:
        if self._late is not None:
            self._late.cancel()
        data = b""
        with contextlib.suppress(OSError):  # a terminal that has gone
            data = os.read(self._fd, 1024)
        if not data:
            self._loop.remove_reader(self._fd)
            self._on_end()
            return
        self._tell(self._decoder.feed(data))
        if self._decoder.is_open:
            self._late = self._loop.call_later(_ESCAPE_TIMEOUT_S, lambda: self._tell(self._decoder.flush()))

    def _tell(self, keys: list[str]) -> None:
        for key in keys:
            self._on_key(key)

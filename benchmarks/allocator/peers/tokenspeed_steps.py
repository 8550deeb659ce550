"""TokenSpeed's C++ scheduler whole: one group of full attention, prefix caching on, one step in flight.

Inside: next_execution_plan and its batch read (requests, tables of blocks as arrays), the event of the step before
made, and advance. Outside: the model's output, and the runtime's Python around the scheduler (stops, requests' states).
"""

from __future__ import annotations

from stepping import Load, Stopwatch, drive
from tokenspeed_driver import make_scheduler, request, sampled


class TokenSpeed:
    """All requests decode once it is made, with a step in flight."""

    def __init__(self, load: Load) -> None:
        self._scheduler = make_scheduler(load.num_blocks, max_requests=load.num_running)
        self._scheduler.submit_requests([request(number, tokens) for number, tokens in enumerate(load.prompts())])
        while self._scheduler.decoding_size() < load.num_running:
            self._compute_prompts()

    def _compute_prompts(self) -> None:
        """A step of prompts; the last one, of all requests, is left in flight."""
        [batch] = self._scheduler.next_execution_plan().forward
        self._in_flight = batch.request_ids
        if batch.num_extends():
            ends = map(int.__add__, batch.extend_prefix_lens, batch.input_lengths)
            runs = zip(batch.request_ids, ends, batch.prefill_lengths, strict=True)
            self._scheduler.advance(sampled(name for name, end, length in runs if end == length))

    def step(self, watch: Stopwatch) -> int:
        """The next step planned, and the tokens of the one before it taken."""
        watch.start()
        [batch] = self._scheduler.next_execution_plan().forward
        names = batch.request_ids
        batch.block_tables_arrays()
        watch.lap("next_execution_plan")
        before, self._in_flight = self._in_flight, names
        watch.start()
        self._scheduler.advance(sampled(before))
        watch.lap("advance")
        return len(names)


if __name__ == "__main__":
    drive(TokenSpeed, package="tokenspeed-scheduler")

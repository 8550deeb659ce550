"""Shares of steps and places for tenants of equal priority. Pure.

Start-time fair queueing (Goyal, Vin and Cheng 1996). A request gets a tag when it arrives, and lower tags are served
first. The tag is where the tenant's request before it ends, in tokens divided by the tenant's weight, and no lower than
the place of the line at this time. So the requests of a tenant with a long line and those of other tenants alternate.

Beside the tags, a tenant with fewer running sequences than its share may take places and blocks of one with more.
"""

from collections import Counter, abc
from dataclasses import dataclass

from quire.client.engine.scheduling.sequence import Sequence
from quire.client.errors import InvalidRequest

# A tag counts thousandths of a token, so that weights need no fractions.
_SCALE = 1000
_MIN_WEIGHT, _MAX_WEIGHT = 0.001, 1000.0
# The output expected of a request before any has ended, in tokens.
_FIRST_GUESS = 256.0


@dataclass(slots=True)
class _Account:
    """A tenant's living sequences of one priority, and the tag of its next one."""

    num_living: int = 0
    next_tag: int = 0


class FairShares:
    """Tags for new sequences, and each tenant's load. Keeps nothing of a tenant without living sequences."""

    def __init__(self, weights: abc.Mapping[str, float]) -> None:
        """Take weights by tenant; a tenant without one has 1. Raises InvalidRequest."""
        self.set_weights(weights)
        self._accounts: dict[tuple[int, str], _Account] = {}
        self._last_served: dict[int, int] = {}  # by priority, the highest tag that has run
        self._num_living: Counter[int] = Counter()  # by priority
        self._mean_output = _FIRST_GUESS

    def set_weights(self, weights: abc.Mapping[str, float]) -> None:
        """Take other weights, for the tags given from now on. Raises InvalidRequest, nothing changed."""
        for tenant, weight in weights.items():
            if not _MIN_WEIGHT <= weight <= _MAX_WEIGHT:
                raise InvalidRequest.of_field(
                    f"weights[{tenant!r}]", weight, f"from {_MIN_WEIGHT} to {_MAX_WEIGHT:.0f}"
                )
        self._weights = dict(weights)

    def weight(self, tenant: str) -> float:
        """Return a tenant's part of what all with work get."""
        return self._weights.get(tenant, 1.0)

    def add(self, sequence: Sequence, running: abc.Sequence[Sequence]) -> int:
        """Return the tag of a new sequence. running: the sequences in the pool, the first in rank first."""
        priority, tenant = sequence.priority, sequence.tenant
        account = self._accounts.setdefault((priority, tenant), _Account())
        peers = [other for other in running if other.priority == priority]
        if peers:
            self._serve(priority, tag_of(peers[-1]))
        tag = max(account.next_tag, self._place_of(tenant, peers, self._last_served.get(priority, 0)))
        account.num_living += 1
        self._num_living[priority] += 1
        account.next_tag = tag + int(self._cost_of(sequence) * _SCALE / self.weight(tenant))
        return tag

    def end(self, sequence: Sequence) -> None:
        """Count the end of a sequence that was added."""
        priority, key = sequence.priority, (sequence.priority, sequence.tenant)
        self._mean_output += (len(sequence.token_ids) - sequence.num_prompt_tokens - self._mean_output) / 8
        self._accounts[key].num_living -= 1
        self._num_living[priority] -= 1
        if not self._accounts[key].num_living:
            del self._accounts[key]
        if self._num_living[priority]:
            if sequence.was_admitted:
                self._serve(priority, tag_of(sequence))
        else:
            del self._num_living[priority]
            self._last_served.pop(priority, None)

    def loads(self, running: abc.Iterable[Sequence]) -> "Loads":
        """Return the tenants' loads by the sequences that run."""
        return Loads(self, Counter(sequence.tenant for sequence in running))

    def _serve(self, priority: int, tag: int) -> None:
        self._last_served[priority] = max(tag, self._last_served.get(priority, 0))

    def _place_of(self, tenant: str, peers: abc.Iterable[Sequence], last_served: int) -> int:
        """Return the tag before the first running sequence by which another tenant has more than this one would."""
        counts: Counter[str] = Counter()
        own = sum(peer.tenant == tenant for peer in peers)
        load = (own + 1) / self.weight(tenant)
        for peer in peers:
            counts[peer.tenant] += 1
            if peer.tenant != tenant and counts[peer.tenant] / self.weight(peer.tenant) > load:
                return min(last_served, tag_of(peer) - 1)
        return last_served

    def _cost_of(self, sequence: Sequence) -> float:
        """Return the tokens that a sequence will probably compute; samples of one prompt share it."""
        prompt = 0 if sequence.index else sequence.num_prompt_tokens
        most = sequence.max_tokens if sequence.group is None else sequence.group.max_tokens
        return prompt + sequence.num_places * min(float(most), max(1.0, self._mean_output))


class Loads:
    """Running sequences by tenant, divided by the tenant's weight."""

    __slots__ = ("_counts", "_shares")

    def __init__(self, shares: FairShares, counts: abc.Mapping[str, int]) -> None:
        self._shares = shares
        self._counts = counts

    def of(self, tenant: str) -> float:
        """Return a tenant's load."""
        return self._counts.get(tenant, 0) / self._shares.weight(tenant)

    def may_take(self, newcomer: Sequence, holder: Sequence) -> bool:
        """Return True if the newcomer's tenant has less than the holder's, one more sequence counted."""
        own = self._counts.get(newcomer.tenant, 0) + 1
        return own / self._shares.weight(newcomer.tenant) < self.of(holder.tenant)


def tag_of(sequence: Sequence) -> int:
    """Return the tag of a sequence; it orders sequences of equal priority."""
    return sequence.rank[1]


def divide(demands: abc.Mapping[str, int], weight: abc.Callable[[str], float], budget: int) -> abc.Mapping[str, int]:
    """Return the tokens of a step that each tenant gets: by weight, none more than it demands, none left over."""
    given = dict.fromkeys(demands, 0)
    open_tenants = [tenant for tenant in demands if demands[tenant]]
    while budget and open_tenants:
        total = sum(map(weight, open_tenants))
        shares = {tenant: int(budget * weight(tenant) / total) for tenant in open_tenants}
        if not any(shares.values()):
            shares[open_tenants[0]] = budget
        for tenant, share in shares.items():
            taken = min(share, demands[tenant] - given[tenant])
            given[tenant] += taken
            budget -= taken
        open_tenants = [tenant for tenant in open_tenants if given[tenant] < demands[tenant]]
    return given

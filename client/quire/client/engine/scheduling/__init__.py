"""The scheduler: which sequences run in the next step, which wait, and which are preempted.

    engine                          Scheduler                                      cachemgr, worker
    a request                  ->   its sequences wait, by rank
                                    schedule(): the next plan                  ->  cachemgr
                                    on_planned(): sequences begin,             <-  its answer
                                    or are preempted for others
                                    the step is in flight                      ->  worker
    tokens, ended sequences    <-   on_step_done()                             <-  its tokens
    failed requests            <-   on_step_failed(), on_step_refused()        <-  a failure, a refusal

    scheduler.py       the calls above; it owns the state and hands each part what it needs
    new_sequences.py   the sequences of a request, before the scheduler takes them
    request_limits.py  a new request is within the limits of the model and of the pool
    sequence.py        one stream of tokens, its states; the beams of one search
    policy.py          rank, victim, reserve, admission: exchangeable
    fairness.py        the default policy's shares of tenants
    queues.py          all sequences, in a collection for each state
    room.py            the room in the pool, as the last answers show it
    planning.py        the next plan
    speculation.py     the sequences that get drafts, and how many
    guessing.py        the drafters of one sequence, and how often they are right
    lookup.py          drafters: what followed the last tokens before
    step_costs.py      the time of a step, by its number of tokens
    answers.py         cachemgr's answer to it
    shortage.py        refusals for lack of blocks
    preemption.py      the running sequences that are preempted for others
    tier.py            the cost of the host tier against computing again
    flight.py          the steps in flight, and how many there may be
    failures.py        steps and plans that failed or were refused
    beams.py           successors of beams as sequences
    beam_search.py     the choice of these successors
    ending.py          the end of a sequence
    plans.py           plans, answers and steps as values
    layer_groups.py    the blocks of a sequence, by the model's layer groups
    statistics.py      counters

All of it is pure: no I/O, clock, randomness or logging. The engine calls it from one task.
"""

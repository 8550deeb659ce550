"""Workers of several ranks: one process and one device each, a part of the model and of the pool each.

Rank 0, the leader, serves as a worker of one rank does: it is attached to cachemgr, checks grants, samples and reports.
The others, its followers, get each step from it and run it with the same executor:

    leader                              follower
    gate, grant checked
    grant applied
    order: the step, by broadcast   ->  grant applied
    forward                        <->  forward             (collectives of the model)
    tokens sampled                  ->  tokens stored       (broadcast on the device)
    all are past the step          <-   past it, and a hash of the block tables if QUIRE_VERIFY=1
    report

    run/ranks.py       the executor's view of a group
    model/sharding.py  the division of a model over ranks
    orders.py          steps, and everything else that the leader sends, as packed integers
    group.py           process groups of torch.distributed, and the detection of a lost rank
    leader.py, follower.py
    process.py         the processes: start, join, end

One epoch for the group: a rank that ends, hangs or can't be reached for twice --step-timeout ends all others.
"""

"""The process around the steps: gRPC for clients, the attachment to cachemgr, start and drain.

    client  -- RunStep, RunSteps, CheckGrammar -->  servicer.py -> steps.py -> run/
    cachemgr  <-- AttachPool: pool, reports; fences, signing keys --  attachment.py -> steps.py

    process.py          load, attach, serve, drain
    roles.py            the roles that may call each method, and the size of its messages
    servicer.py         each handler: decode, call, encode
    steps.py            a step from its acceptance to its report
    attachment.py       registers the pool, executes cachemgr's orders, sends reports
    description.py      the model for clients, the pool for cachemgr
    metrics.py          the metrics page

Nothing here waits for the device, except the caller that gets the answer.
"""

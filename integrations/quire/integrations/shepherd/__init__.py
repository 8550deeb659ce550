"""VllmEngine over a gateway: Shepherd Model Gateway (smg) takes a pool as one of its workers.

    smg                                gateway process, `quire serve --shepherd`
    requests of its callers        ->  Generate: the gateway's engine, one pool
    index of each worker's prefix  <-  SubscribeKvEvents: a snapshot of the pool's blocks, then each change
    load of each worker            <-  GetLoads, and a load record with each batch of events

    service.py     the gRPC service: requests, events, load, health
    messages.py    requests and answers, to and from the engine's
    tokenizer.py   the tokenizer's files as an archive
    events.py      changes of the pool as numbered batches

All that Quire knows of smg is in this folder. The messages are those of the package smg-grpc-proto.
"""

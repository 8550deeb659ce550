"""The gateway, `quire serve`: HTTP and gRPC for callers that need text, and no leases, plans or steps.

    caller                        gateway                                   pools of a model
    JSON over HTTP, or a      ->  decode: texts and fields to tokens    ->  one engine for each pool, or a
    message over gRPC             and parameters                            router that chooses among several
    events or messages        <-  encode                                <-  chunks of tokens and text

    __main__.py        the process: its flags (config.py), checked
    process.py         the process, wired: start to exit
    security.py        TLS, the callers' keys and the tenants' limits, as the flags have them
    app.py             the HTTP application: all endpoints
    anthropic/         Anthropic's endpoints, on parts of OpenAI's
    openai/, grpc/     the endpoints
    http/              the frame of each HTTP endpoint, the server, the page and the process's state
    gateway.py         the state that all endpoints share; each request passes Gateway.generate
    keys.py            API keys of a file: the caller of a request
    tenant_limits.py   rate limits of a file, by tenant
    metrics.py         measurements
    chat/              from a conversation to a prompt, and from text to tool calls
    routing/           the backend that generates: an engine, or a router over several pools
    kept_responses.py  what is kept of answers, for their callers
    prompt_cache.py    what the cache did for a prompt, and why it found less than an earlier one left
    limits.py, fields.py, texts.py, token_texts.py, callers.py, errors.py   values that all levels share

Each module imports modules of the lines below it alone. The contract "gateway" in pyproject.toml has the levels.
"""

"""The frame of HTTP: the code that runs before and after each endpoint's own. It knows no endpoint of `openai`.

server.py     sockets, TLS, limits of connections and headers
browsers.py   names of this server and origins of pages, in requests that browsers send
endpoint.py   the application: a request's id, its caller, errors, a line in the log
bodies.py     the body, within a limit and a time
streams.py    answers as server-sent events; work ends when its caller disconnects
status.py     /health, /ready, /metrics, /version
openapi.py    /openapi.json, and its page at /docs
page.py       the page at `/`, with its files in page/
"""

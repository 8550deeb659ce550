"""Code that all servers share, and a few parts that clients share with them. It knows nothing about blocks.

In the order of a server's life:

    flags           flags.py and options.py (the shared flags and their values), manual.py (--help)
    start           runtime_folder.py and addresses.py (the places to listen); security.py, tls.py, access.py,
                    watched.py (certificates, tokens, roles); runtime.py (garbage collection, memory), polling.py
                    (gRPC's sockets)
    server          server.py (health, signals, drain), systemd.py (READY, watchdog)
    each call       interceptor.py (admission), receiving.py (limits of requests), errors.py (statuses)
    sight           logs.py, tracing.py, metrics.py, metrics_server.py, loop_collector.py
    client's side   dialing.py (channels to a server)
"""

/* The disk below the host tier, and the host tier as far as it has copies: a model of its own beside quire.pml. README.md
   says what is in it: "The disk".

   cachemgr/core/src/cache/{disk,tier,tier_copies}.rs, cachemgr/quire/cachemgr/service/attachments.py;
   worker/disk/{disk_tier,store}.py.

   A prefix hash is a number from 1 on, and each has a tenant of its own. Its content has a version, which rises with a
   reset: what was computed before must not be found after it. Each step has a lease of its own, and copies one block from
   the pool to the host tier, or back. Sizes by -D, as in quire.pml. */

#ifndef CONTENTS
#define CONTENTS 2
#endif
#ifndef HOST            /* blocks */
#define HOST 2
#endif
#ifndef DISK            /* blocks */
#define DISK 1
#endif
#ifndef STEPS           /* over the whole run */
#define STEPS 2
#endif
#ifndef MOVES           /* orders to write and to read, over the whole run */
#define MOVES 2
#endif
#ifndef RESETS
#define RESETS 0
#endif
#ifndef ENDS            /* leases that end before their step is reported */
#define ENDS 0
#endif
#ifndef BREAKS          /* of the stream */
#define BREAKS 0
#endif
#ifndef RESTARTS        /* of the worker */
#define RESTARTS 0
#endif
#ifndef DEATHS          /* of cachemgr, which comes back with its books (warm) or without them (cold) */
#define DEATHS 0
#endif
#ifndef FAILURES        /* orders that the disk fails */
#define FAILURES 0
#endif
#ifndef QUEUE
#define QUEUE 6
#endif
#ifndef ONLY
#define ONLY 0
#endif
#ifndef FAULT
#define FAULT 0
#endif

#include "faults.pml"

#define NONE    255
#define CHANGED 9               /* a header that is no header: of a copy that is being written */
#define ORDERS  (MOVES + RESETS * (1 + RESTARTS + DEATHS))

#define KV(h, version)  ((h) + 8 * (version))
#define HASH_OF(kv)     ((kv) % 8)
#define VERSION_OF(kv)  ((kv) / 8)

/* -- cachemgr ------------------------------------------------------------------------------------------------------ */

byte books_epoch;               /* 0: there are no books */
bit alive = 1;
byte host_hash[HOST];           /* of the copy in a block; 0: none */
bit host_arriving[HOST];
byte host_holds[HOST];
byte to_write[HOST];            /* the hash that a copy had when it was queued to be written */
byte disk_hash[DISK];
bit disk_arriving[DISK];
byte disk_holds[DISK];

#define WRITE 1
#define READ  2
#define ERASE 3
typedef Order {
    byte kind;
    byte hash;
    byte host;
    byte disk;
    byte epoch;                 /* of the books that gave it, or gave it again */
    bit open
}
Order order[ORDERS];            /* in the order of their numbers, over all epochs */
byte num_orders, num_moves;
byte unerased;                  /* hashes of orders to erase that failed: for the next epoch */
byte waiting;                   /* hashes whose reset is not answered */

#define NOT_PLANNED 0
#define IN_FLIGHT   1
#define ENDING      2           /* its lease has ended, and the worker has not answered */
#define GONE        3
#define KEEP 0                  /* from the pool to the host tier */
#define BACK 1
typedef Step {
    byte life;
    bit kind;
    byte hash;
    byte host;
    byte epoch;
    byte version                /* ghost: that is copied; of BACK, the least that may be found */
}
Step step[STEPS];
byte num_steps;

/* -- the stream, the worker and its files ---------- */

mtype = {ORDER, DONE, FAILED, CONTENT, STEP, BEGIN};
chan down = [QUEUE] of {byte};                  /* orders */
chan up = [QUEUE] of {mtype, byte};
bit stream;

byte epoch = 1, last_epoch = 1;
bit was_attached;               /* in this epoch */
bit is_begun = 1;               /* the model thread has gone on to this epoch */
byte num_obeyed;                /* orders up to here were had */
byte result[ORDERS];            /* 1: done, 2: failed */
#define UNKNOWN 0
#define WAITS   1
#define RAN     2
#define REFUSED 3
byte at_worker[STEPS];
chan thread = [STEPS + 2] of {mtype, byte};
chan writes = [ORDERS * 2 + 1] of {byte, byte}; /* order, epoch in which it was had */
chan reads = [ORDERS + 1] of {byte, byte};
byte host_kv[HOST];
byte told[DISK];                /* the content that the message CONTENT is about */

byte writing = NONE, written_kv;  /* the writer has read its host block */
bit is_writing;                 /* it has begun to write the file */
byte reading = NONE, read_epoch, read_kv;

byte header[DISK];              /* on the disk: the hash of a copy; 0: none */
byte sum[DISK];                 /* in the header: of what content */
byte file_kv[DISK];
byte record[DISK];              /* in memory: the copies that can be read */
byte uncertain;                 /* blocks that may have a copy without a record */

byte now[CONTENTS + 1];         /* ghost: the version that is computed */
byte least[CONTENTS + 1];       /* ghost: the least that may be found */
byte erased[CONTENTS + 1];      /* ghost: no version below lies on the disk */

byte breaks = BREAKS, restarts = RESTARTS, deaths = DEATHS, failures = FAILURES, resets = RESETS, ends = ENDS;
bit c_last;                     /* of blocks that may be taken, the last one is, not the first one */
bit c_fails;

hidden byte i, j, k, n, h, x, d, number, of_epoch, kind;
#define BIT(n) (1 << (n))

/* -- books --------------------------------------------------------------------------------------------------------- */

#define IS_FREE_HOST(b)  (host_hash[b] == 0 && host_holds[b] == 0)
#define IS_FREE_DISK(b)  (disk_hash[b] == 0 && disk_holds[b] == 0)
#define IN_HOST(b, h)    (host_hash[b] == (h) && !host_arriving[b])
#define ON_DISK(b, h)    (disk_hash[b] == (h) && !disk_arriving[b])
#define IS_FOUND(h)      (IN_HOST(0, h) || IN_HOST(HOST - 1, h))
#define IS_STORED(h)     (ON_DISK(0, h) || ON_DISK(DISK - 1, h))
#if HOST > 2 || DISK > 2 || CONTENTS > 3
#error "larger than the model's choices are made for"
#endif

/* x: a block of the host tier for a copy that arrives, held once; NONE if there is one already, or no room. */
inline keep_in_host(content) {
    x = NONE;
    if
    :: IS_FOUND(content)
    :: else ->
        for (j : 0 .. HOST - 1) {
            if
            :: IS_FREE_HOST(j) && (x == NONE || c_last) -> x = j
            :: else
            fi
        }
        for (j : 0 .. HOST - 1) {
            if
            :: x == NONE && host_hash[j] && !host_arriving[j] && host_holds[j] == 0 -> x = j
            :: x != NONE && !IS_FREE_HOST(x) && c_last && host_hash[j] && !host_arriving[j] && host_holds[j] == 0 -> x = j
            :: else
            fi
        }
        if
        :: x != NONE ->
            if
            :: host_hash[x] -> MARK(REACH_HOST_EVICTION)
            :: else
            fi;
            host_hash[x] = content; host_arriving[x] = 1; host_holds[x]++
        :: else
        fi
    fi
}

/* d: the same on the disk. */
inline keep_on_disk(content) {
    d = NONE;
    if
    :: IS_STORED(content)
    :: else ->
        for (j : 0 .. DISK - 1) {
            if
            :: IS_FREE_DISK(j) && d == NONE -> d = j
            :: else
            fi
        }
        for (j : 0 .. DISK - 1) {
            if
            :: d == NONE && disk_hash[j] && !disk_arriving[j] && disk_holds[j] == 0 ->
                d = j; MARK(REACH_DISK_EVICTION)
            :: else
            fi
        }
        if
        :: d != NONE -> disk_hash[d] = content; disk_arriving[d] = 1; disk_holds[d]++
        :: else
        fi
    fi
}

inline give_order(what, content, host_block, disk_block) {
    order[num_orders].kind = what; order[num_orders].hash = content;
    order[num_orders].host = host_block; order[num_orders].disk = disk_block;
    order[num_orders].epoch = books_epoch; order[num_orders].open = 1;
    printf("cachemgr gives order %d, kind %d: content %d, host block %d, disk block %d\n",
           num_orders, what, content, host_block, disk_block);
    if
    :: stream && alive -> down ! num_orders
    :: else
    fi;
    num_orders++
}

#define IS_OPEN(n, what)  (order[n].open && order[n].kind == (what))

/* One write at a time is ordered. */
inline write_behind() {
    for (i : 0 .. HOST - 1) {
        k = 0;
        for (n : 0 .. ORDERS - 1) { k = k + IS_OPEN(n, WRITE) }
        if
        :: to_write[i] && k == 0 && num_moves < MOVES ->
            h = to_write[i]; to_write[i] = 0;
            if
            :: IN_HOST(i, h) ->
                keep_on_disk(h);
                if
                :: d != NONE ->
                    host_holds[i] = host_holds[i] + (FAULT != FAULT_WRITTEN_UNHELD);
                    num_moves++;
                    give_order(WRITE, h, i, d)
                :: else
                fi
            :: else -> MARK(REACH_LEFT_UNWRITTEN)
            fi
        :: else
        fi
    }
}

inline arrive_in_host(b) {
    if
    :: host_hash[b] && host_arriving[b] ->
        if
        :: IS_FOUND(host_hash[b]) -> host_hash[b] = 0; host_arriving[b] = 0
        :: else -> host_arriving[b] = 0
        fi
    :: else
    fi
}

/* A step was reported. */
inline settle(s) {
    printf("cachemgr hears that step %d has ended\n", s);
    if
    :: step[s].kind == KEEP ->
        arrive_in_host(step[s].host);
        to_write[step[s].host] = (host_arriving[step[s].host] -> 0 : host_hash[step[s].host])
    :: else
    fi;
    host_holds[step[s].host]--;
    step[s].life = GONE;
    write_behind()
}

/* No step of the lease can run any more, and nobody knows if this one has. */
inline close(s) {
    printf("cachemgr closes the lease of step %d\n", s);
    if
    :: step[s].kind == KEEP && FAULT != FAULT_UNREPORTED_KEPT ->
        host_hash[step[s].host] = 0; host_arriving[step[s].host] = 0
    :: step[s].kind == KEEP && FAULT == FAULT_UNREPORTED_KEPT -> arrive_in_host(step[s].host)
    :: else
    fi;
    host_holds[step[s].host]--;
    step[s].life = GONE
}

/* Order n was carried out, or failed. */
inline end_order(is_done) {
    order[n].open = 0;
    i = order[n].host; d = order[n].disk; h = order[n].hash;
    if
    :: order[n].kind == WRITE ->
        if
        :: is_done && disk_hash[d] && disk_arriving[d] ->
            if
            :: IS_STORED(disk_hash[d]) -> disk_hash[d] = 0
            :: else
            fi;
            disk_arriving[d] = 0
        :: !is_done -> disk_hash[d] = 0; disk_arriving[d] = 0
        :: else
        fi;
        disk_holds[d]--;
        host_holds[i] = host_holds[i] - (FAULT != FAULT_WRITTEN_UNHELD)
    :: order[n].kind == READ ->
        if
        :: is_done || FAULT == FAULT_FAILED_READ_FOUND -> arrive_in_host(i)
        :: else -> host_hash[i] = 0; host_arriving[i] = 0; disk_hash[d] = 0; disk_arriving[d] = 0
        fi;
        disk_holds[d]--;
        host_holds[i]--
    :: order[n].kind == ERASE && is_done -> unerased = unerased & ~BIT(h)
    :: order[n].kind == ERASE && !is_done ->
        MARK(REACH_ERASE_FAILED);
        if
        :: FAULT != FAULT_FAILED_ERASE_FORGOTTEN -> unerased = unerased | BIT(h)
        :: else
        fi
    fi
}

inline erases(content) {
    x = (unerased & BIT(content) -> 1 : 0);
    for (k : 0 .. ORDERS - 1) { x = (x || (IS_OPEN(k, ERASE) && order[k].hash == content)) }
}

/* It is about hash `content`, the content of one tenant. */
inline reset(content) {
    printf("cachemgr resets content %d\n", content);
    now[content]++;
    least[content] = now[content];
    if
    :: FAULT != FAULT_RESET_KEEPS_COPIES ->
        for (j : 0 .. HOST - 1) {
            if
            :: host_hash[j] == content -> host_hash[j] = 0; host_arriving[j] = 0
            :: else
            fi
        }
        for (j : 0 .. DISK - 1) {
            if
            :: disk_hash[j] == content -> disk_hash[j] = 0; disk_arriving[j] = 0
            :: else
            fi
        }
    :: else
    fi;
    if
    :: FAULT != FAULT_RESET_KEEPS_FILES -> give_order(ERASE, content, 0, 0)
    :: else
    fi;
    if
    :: !stream
    :: stream && FAULT == FAULT_RESET_KEEPS_FILES -> answer_reset(content)
    :: else -> waiting = waiting | BIT(content)
    fi
}

inline answer_reset(content) {
    MARK(REACH_RESET_ANSWERED);
    erased[content] = now[content];
    for (j : 0 .. DISK - 1) {
        REQUIRE(HASH_OF(file_kv[j]) != content || VERSION_OF(file_kv[j]) >= now[content], ERASED)
    }
}

/* When nothing is to be erased any more, all that wait are answered. */
inline answer_resets() {
    k = 0;
    for (j : 0 .. ORDERS - 1) { k = k + IS_OPEN(j, ERASE) }
    for (h : 1 .. CONTENTS) {
        if
        :: k == 0 && (waiting & BIT(h)) -> waiting = waiting & ~BIT(h); answer_reset(h)
        :: else
        fi
    }
}

/* -- what is heard ------------------------------------------------------------------------------------------------- */

inline enter_content() {
    for (i : 0 .. DISK - 1) {
        h = told[i];
        if
        :: h ->
            erases(h);
            if
            :: x && FAULT != FAULT_ERASED_FOUND -> MARK(REACH_ERASED_NOT_ENTERED)
            :: (!x || FAULT == FAULT_ERASED_FOUND) && !IS_STORED(h) &&
               (IS_FREE_DISK(i) || FAULT == FAULT_FOUND_TAKES_BLOCK) ->
                REQUIRE(IS_FREE_DISK(i), I1);
                MARK(REACH_CONTENT_FOUND);
                disk_hash[i] = h; disk_arriving[i] = 0
            :: else
            fi
        :: else
        fi
    }
}

inline hear() {
    if
    :: kind == CONTENT -> printf("cachemgr hears what is on the disk\n"); enter_content()
    :: kind != CONTENT && order[n].open && order[n].epoch == books_epoch ->
        printf("cachemgr hears of order %d: %e\n", n, kind);
        number = n;
        end_order((kind == DONE));
        if
        :: order[number].kind == ERASE && kind == FAILED -> waiting = 0
        :: else -> answer_resets()
        fi;
        write_behind()
    :: else -> MARK(REACH_ORDER_REPORTED_AGAIN)
    fi
}

inline empty_down() { do :: len(down) > 0 -> down ? _ :: else -> break od }
inline empty_up() { do :: len(up) > 0 -> up ? _, _ :: else -> break od }

/* What is on its way up may be heard until the end is noticed: at the latest when the worker registers again. */
inline break_stream() {
    stream = 0; waiting = 0;
    empty_down()
}

/* The worker presents itself. Its books go on with the epoch, or are new ones. */
inline register() {
    empty_up();
    if
    :: books_epoch != epoch ->
        if
        :: was_attached -> begin_epoch()
        :: else
        fi;
        begin_books()
    :: else -> MARK(REACH_ATTACHED_AGAIN)
    fi;
    printf("cachemgr attaches epoch %d\n", epoch);
    stream = 1;
    if
    :: !was_attached ->
        for (j : 0 .. DISK - 1) { told[j] = record[j] }
        up ! CONTENT, 0
    :: else
    fi;
    was_attached = 1;
    for (n : 0 .. ORDERS - 1) {
        if
        :: order[n].open -> down ! n
        :: else
        fi
    }
}

/* Books of a new epoch. Content that is to be erased still is. */
inline begin_books() {
    books_epoch = epoch;
    for (j : 0 .. HOST - 1) { host_hash[j] = 0; host_arriving[j] = 0; host_holds[j] = 0; to_write[j] = 0 }
    for (j : 0 .. DISK - 1) { disk_hash[j] = 0; disk_arriving[j] = 0; disk_holds[j] = 0 }
    for (j : 0 .. STEPS - 1) {
        if
        :: step[j].life != NOT_PLANNED -> step[j].life = GONE
        :: else
        fi
    }
    k = num_orders;
    for (n : 0 .. ORDERS - 1) {
        if
        :: n < k && order[n].open && order[n].kind == ERASE -> unerased = unerased | BIT(order[n].hash)
        :: else
        fi;
        order[n].open = 0
    }
    for (h : 1 .. CONTENTS) {
        if
        :: (unerased & BIT(h)) && FAULT != FAULT_ERASE_NOT_CARRIED -> give_order(ERASE, h, 0, 0)
        :: else
        fi
    }
    unerased = 0
}

/* -- the worker ---------------------------------------------------------------------------------------------------- */

inline begin_epoch() {
    printf("worker begins epoch %d\n", last_epoch + 1);
    MARK(REACH_NEW_EPOCH_OF_WORKER);
    last_epoch++; epoch = last_epoch;
    was_attached = 0;
    is_begun = 0;
    thread ! BEGIN, 0
}

inline report(o, is_done) {
    result[o] = (is_done -> 1 : 2);
    if
    :: stream && is_done -> up ! DONE, o
    :: stream && !is_done -> up ! FAILED, o
    :: else
    fi
}

inline obey() {
    if
    :: n < num_obeyed && result[n] == 1 && order[n].open -> up ! DONE, n
    :: n < num_obeyed && result[n] == 2 && order[n].open -> up ! FAILED, n
    :: n >= num_obeyed ->
        num_obeyed = n + 1;
        if
        :: order[n].kind == READ || (order[n].kind == ERASE && FAULT == FAULT_ERASE_OVERTAKES) -> reads ! n, epoch
        :: else -> writes ! n, epoch
        fi
    :: else
    fi
}

inline erase_files(content) {
    for (j : 0 .. DISK - 1) {
        if
        :: record[j] == content || (uncertain & BIT(j)) ->
            record[j] = 0; header[j] = 0; sum[j] = 0; file_kv[j] = 0
        :: else
        fi
    }
    uncertain = 0
}

/* It could not: what it is about has no record any more. */
inline fail_to_erase(content) {
    for (j : 0 .. DISK - 1) {
        if
        :: record[j] == content -> record[j] = 0; uncertain = uncertain | BIT(j)
        :: else
        fi
    }
}

inline carry_out_erase() {
    printf("worker erases content %d, fails %d\n", order[n].hash, c_fails);
    if
    :: c_fails -> failures--; fail_to_erase(order[n].hash)
    :: else -> erase_files(order[n].hash)
    fi;
    if
    :: of_epoch == epoch -> report(n, !c_fails)
    :: else
    fi
}

inline begin_write() {
    if
    :: of_epoch != epoch && FAULT != FAULT_OLD_EPOCH_WRITES -> MARK(REACH_WRITE_OF_OLD_EPOCH)
    :: else ->
        printf("worker reads host block %d for order %d\n", order[n].host, n);
        writing = n; written_kv = host_kv[order[n].host]
    fi
}

/* The content is in the file, or a part of it. */
inline write_content() {
    d = order[writing].disk;
    record[d] = 0; uncertain = uncertain | BIT(d);
    is_writing = 1;
    header[d] = (FAULT == FAULT_HEADER_LEFT -> header[d] : CHANGED);
    file_kv[d] = written_kv;
    REQUIRE(VERSION_OF(written_kv) >= erased[HASH_OF(written_kv)], ERASED)
}

inline end_write(is_done) {
    d = order[writing].disk;
    printf("worker ends order %d, is done: %d\n", writing, is_done);
    if
    :: is_done ->
        header[d] = order[writing].hash; sum[d] = written_kv;
        record[d] = header[d]; uncertain = uncertain & ~BIT(d)
    :: else -> failures--; record[d] = 0; uncertain = uncertain | BIT(d)
    fi;
    if
    :: order[writing].epoch == epoch -> report(writing, is_done)
    :: else -> MARK(REACH_WRITTEN_IN_NEW_EPOCH)
    fi;
    writing = NONE; written_kv = 0; is_writing = 0
}

#define IS_WHOLE(b, hash) ((record[b] == (hash) || (record[b] && FAULT == FAULT_READ_UNCHECKED)) && \
    header[b] == record[b] && sum[b] == file_kv[b])

inline begin_read() {
    d = order[n].disk;
    if
    :: !c_fails && IS_WHOLE(d, order[n].hash) -> reading = n; read_epoch = of_epoch; read_kv = file_kv[d]
    :: else ->
        printf("worker can't read disk block %d for order %d\n", d, n);
        MARK(REACH_READ_FAILED);
        failures = failures - c_fails;
        if
        :: of_epoch == epoch -> report(n, 0)
        :: else
        fi
    fi
}

#define MAY_TOUCH (is_begun || FAULT == FAULT_READ_BEFORE_BEGUN)

inline end_read() {
    printf("worker writes host block %d for order %d\n", order[reading].host, reading);
    if
    :: read_epoch == epoch || FAULT == FAULT_OLD_EPOCH_READS -> host_kv[order[reading].host] = read_kv
    :: else -> MARK(REACH_READ_OF_OLD_EPOCH)
    fi;
    if
    :: read_epoch == epoch -> report(reading, 1)
    :: else
    fi;
    reading = NONE; read_kv = 0; read_epoch = 0
}

/* A step copies what it was granted, also one of an epoch that is over: it is not reported then. */
inline run_step() {
    printf("worker runs step %d of epoch %d\n", n, step[n].epoch);
    i = step[n].host;
    if
    :: step[n].kind == KEEP -> host_kv[i] = KV(step[n].hash, step[n].version)
    :: else ->
        REQUIRE(HASH_OF(host_kv[i]) == step[n].hash && VERSION_OF(host_kv[i]) >= step[n].version, I6);
        MARK(REACH_COPIED_BACK)
    fi;
    at_worker[n] = RAN
}

/* Another process of the worker: a copy that is being written is cut off. What has a header of this pool is found; the
   content behind any other is removed. */
inline restart_worker() {
    printf("worker starts again\n");
    if
    :: is_writing -> MARK(REACH_KILLED_IN_WRITE)
    :: else
    fi;
    break_stream();
    do :: len(thread) > 0 -> thread ? _, _ :: else -> break od;
    do :: len(writes) > 0 -> writes ? _, _ :: else -> break od;
    do :: len(reads) > 0 -> reads ? _, _ :: else -> break od;
    writing = NONE; written_kv = 0; is_writing = 0; reading = NONE; read_kv = 0; read_epoch = 0;
    uncertain = 0; is_begun = 1; was_attached = 0;
    last_epoch++; epoch = last_epoch;
    for (j : 0 .. STEPS - 1) {
        if
        :: at_worker[j] == WAITS -> at_worker[j] = REFUSED
        :: else
        fi
    }
    for (j : 0 .. HOST - 1) { host_kv[j] = 0 }
    for (j : 0 .. DISK - 1) {
        record[j] = (header[j] == CHANGED -> 0 : header[j]);
        if
        :: header[j] == CHANGED -> header[j] = 0; sum[j] = 0; file_kv[j] = 0
        :: else
        fi
    }
}

/* -- processes ----------------------------------------------------------------------------------------------------- */

#define CAN_PLAN (alive && stream && num_steps < STEPS)

inline begin_step(what, content, b) {
    step[num_steps].kind = what; step[num_steps].hash = content; step[num_steps].host = b;
    step[num_steps].epoch = books_epoch; step[num_steps].life = IN_FLIGHT;
    step[num_steps].version = (what == KEEP -> now[content] : least[content]);
    printf("cachemgr plans step %d, kind %d: content %d, host block %d\n", num_steps, what, content, b);
    num_steps++
}

/* A plan evicts a block with this content. */
inline plan_keep(content) {
    keep_in_host(content);
    if
    :: x != NONE -> begin_step(KEEP, content, x)
    :: else
    fi
}

/* An admission finds a copy in the host tier. */
inline plan_back(content) {
    x = (IN_HOST(0, content) -> 0 : HOST - 1);
    host_holds[x]++;
    begin_step(BACK, content, x)
}

/* An admission that waits finds one on the disk: it is refused, and the copy is read. */
inline plan_read(content) {
    d = (ON_DISK(0, content) -> 0 : DISK - 1);
    keep_in_host(content);
    if
    :: x != NONE -> disk_holds[d]++; num_moves++; give_order(READ, content, x, d); MARK(REACH_READ_ORDERED)
    :: else
    fi
}

#define IS_READ(n, content) (IS_OPEN(n, READ) && order[n].hash == (content))

inline is_being_read(content) {
    x = 0;
    for (k : 0 .. ORDERS - 1) { x = (x || IS_READ(k, content)) }
}

inline choose_last() { if :: c_last = 0 :: HOST > 1 -> c_last = 1 fi }

proctype client(byte content) {
end:
    do
    :: atomic { CAN_PLAN -> choose_last(); d_step { plan_keep(content); c_last = 0; skip } }
    :: d_step { CAN_PLAN && IS_FOUND(content) -> plan_back(content); skip }
    :: atomic { alive && stream && num_moves < MOVES && !IS_FOUND(content) && IS_STORED(content) ->
           choose_last();
           d_step {
               is_being_read(content);
               if
               :: !x -> plan_read(content)
               :: else
               fi;
               c_last = 0;
               skip } }
    :: d_step { resets > 0 && alive && books_epoch -> resets--; reset(content); skip }
    od
}

proctype lease(byte s) {
end:
    do
    :: d_step { ends > 0 && alive && step[s].life == IN_FLIGHT -> ends--; step[s].life = ENDING; skip }
    :: d_step { step[s].life == IN_FLIGHT && at_worker[s] == UNKNOWN && step[s].epoch == epoch ->
           at_worker[s] = WAITS; thread ! STEP, s; skip }
    :: d_step { alive && stream && step[s].life == IN_FLIGHT && at_worker[s] == RAN -> settle(s); skip }
    :: d_step { alive && stream && step[s].life == ENDING && at_worker[s] != WAITS ->
           at_worker[s] = (at_worker[s] == RAN -> RAN : REFUSED); MARK(REACH_CLOSED_UNREPORTED); close(s); skip }
    od
}

proctype cachemgr() {
end:
    do
    :: d_step { alive && len(up) > 0 -> up ? kind, n; hear(); skip }
    od
}

proctype worker() {
end:
    do
    :: d_step { alive && !stream -> register(); skip }
    :: d_step { stream && len(down) > 0 -> down ? n; obey(); skip }
    :: d_step { len(thread) > 0 ->
           thread ? kind, n;
           if
           :: kind == STEP -> run_step()
           :: else -> is_begun = 1
           fi;
           skip }
    od
}

inline choose_failure() { if :: c_fails = 0 :: failures > 0 -> c_fails = 1 fi }

proctype writer() {
end:
    do
    :: atomic { writing == NONE && len(writes) > 0 ->
           choose_failure();
           d_step {
               writes ? n, of_epoch;
               if
               :: order[n].kind == ERASE -> carry_out_erase()
               :: c_fails -> writing = n; written_kv = 0; end_write(0)
               :: else -> begin_write()
               fi;
               c_fails = 0;
               skip } }
    :: d_step { writing != NONE && !is_writing -> write_content(); skip }
    :: d_step { is_writing -> end_write(1); skip }
    :: d_step { is_writing && failures > 0 -> end_write(0); skip }
    od
}

proctype reader() {
end:
    do
    :: atomic { reading == NONE && len(reads) > 0 ->
           choose_failure();
           d_step {
               reads ? n, of_epoch;
               if
               :: order[n].kind == ERASE -> carry_out_erase()
               :: else -> begin_read()
               fi;
               c_fails = 0;
               skip } }
    :: d_step { reading != NONE && MAY_TOUCH -> end_read(); skip }
    od
}

proctype network() {
end:
    do
    :: false
#if BREAKS > 0
    :: d_step { breaks > 0 && stream -> breaks--; printf("network: the stream breaks\n"); break_stream(); skip }
#endif
#if RESTARTS > 0
    :: d_step { restarts > 0 -> restarts--; restart_worker(); skip }
#endif
#if DEATHS > 0
    :: d_step { deaths > 0 && alive ->
           deaths--; printf("cachemgr dies\n"); alive = 0; break_stream(); empty_up(); skip }
    :: d_step { !alive -> alive = 1; printf("cachemgr starts again with its books\n"); skip }
    :: d_step { !alive ->
           alive = 1; printf("cachemgr starts again without books\n");
           books_epoch = 0; unerased = 0;
           for (n : 0 .. ORDERS - 1) { order[n].open = 0 }
           for (n : 1 .. CONTENTS) { least[n] = erased[n] }
           skip }
#endif
    od
}

/* Leases that did not end by themselves end here. */
proctype the_end() {
    timeout;
    d_step {
        REQUIRE(alive && stream, PROGRESS);
        for (n : 0 .. ORDERS - 1) { REQUIRE(!order[n].open, PROGRESS) }
        REQUIRE(!waiting, PROGRESS);
        for (n : 0 .. STEPS - 1) { REQUIRE(step[n].life == NOT_PLANNED || step[n].life == GONE, PROGRESS) }
        for (n : 0 .. HOST - 1) { REQUIRE(host_holds[n] == 0 && !host_arriving[n], I8) }
        for (n : 0 .. DISK - 1) { REQUIRE(disk_holds[n] == 0 && !disk_arriving[n], I8) }
    }
}

init {
    byte s;
    atomic {
        for (s : 1 .. CONTENTS) { run client(s) }
        for (s : 0 .. STEPS - 1) { run lease(s) }
        run cachemgr(); run worker(); run writer(); run reader(); run network(); run the_end()
    }
}

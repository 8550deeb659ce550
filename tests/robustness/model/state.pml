/* Everything there is to know. Arrays with two indexes are flat. */

#define NONE       255
#define NO_STREAM    2
#define NO_STEP    255
#define SLOTS      (LEASES * STEPS)
#define BIT(n)     (1 << (n))

#define MANAGER(l)    ((l) % MANAGERS)     /* whose lease it is */
#define TENANT(l)     ((l) % TENANTS)
/* Leases of a manager and tenant are alike: they are made in the order of their numbers. */
#define IS_TURN(l)    (TENANTS > 1 || (l) < MANAGERS || life[((l) + LEASES - MANAGERS) % LEASES] != UNUSED)
#define SEQ(l, q)     ((l) * SEQS + (q))
#define LEASE_OF(s)   ((s) / SEQS)
#define SLOT(l, k)    ((l) * STEPS + (k))  /* of the lease's k-th plan, from 0 on */
#define LEASE(g)      ((g) / STEPS)
#define AT(s, i)      ((s) * PLACES + (i))
#define INDEX(i)      ((i) % TABLE)        /* of a place in its group's table */
#define GROUP(i)      ((i) / TABLE)        /* 0: full, 1: windowed */
/* Of a slot of a sequence's tables, group by group. */
#define PLACE(i)      ((i) / BLOCK_SIZE)
#define POSITION(i)   ((i) % (BLOCK_SIZE * TABLE))
#define HAS(s, i)     (INDEX(i) < table_length[s] && table[AT(s, i)])  /* a block; not one that was passed */
/* What a token at position p sees in the group of place i. */
#define FIRST_SEEN(i, p)   (GROUP(i) == 0 || (p) + 1 < WINDOW -> 0 : (p) + 1 - WINDOW)
#define FIRST_NEEDED(i, p) (FIRST_SEEN(i, p) / BLOCK_SIZE)
#define MIN(a, b) ((a) < (b) -> (a) : (b))
#define MAX(a, b) ((a) > (b) -> (a) : (b))
#define NUM_BLOCKS(n) (((n) + BLOCK_SIZE - 1) / BLOCK_SIZE)

/* A token's KV is a function of all tokens up to it, of the tenant and of the layer group. All are one number: 1, then a bit per token.
   0 is what nobody computed. */
#define PREFIX(code, length, n) ((code) >> ((length) - (n)))
#define KV(space, prefix)       ((space) * 32 + (prefix))
#define SPACE(l, i)             (TENANT(l) + 2 * GROUP(i))  /* a tenant's tokens in the group of place i */
#define HASH_SPACE(l, i)        (FAULT == FAULT_GROUP_NOT_HASHED -> TENANT(l) : SPACE(l, i))
#if FAULT == FAULT_SHARE_ACROSS_TENANTS
#define HASH(space, prefix)     (prefix)
#else
#define HASH(space, prefix)     KV(space, prefix)
#endif

/* -- cachemgr: one or two, each with books of its own -------------------------------------------------------------- */

#define FREE    0
#define CACHED  1
#define ACTIVE  2
#define RETIRED 3

#define AT_BLOCK(m, b)  ((m) * (BLOCKS + 1) + (b))
#define STATE(m, b)     state[AT_BLOCK(m, b)]
#define REF(m, b)       ref[AT_BLOCK(m, b)]
#define PUBLISHED(m, b) published[AT_BLOCK(m, b)]

bit alive[MANAGERS], died[MANAGERS];
byte term[MANAGERS];
byte epoch_of[MANAGERS];      /* whose books it has; 0: none */
byte ruled[MANAGERS];         /* terms that have ruled it with these books; and 0, which is nobody's */
bit attached[MANAGERS];
byte current[MANAGERS];       /* the stream that orders go to */
byte entered[MANAGERS];       /* the last report that was entered */

byte state[MANAGERS * (BLOCKS + 1)];
byte ref[MANAGERS * (BLOCKS + 1)];
byte published[MANAGERS * (BLOCKS + 1)];  /* the prefix hash by which it is found, or 0 */

#define UNUSED  0
#define OPENING 1             /* open, but its holder does not know it yet */
#define OPEN    2
#define FENCING 3
#define GONE    4

byte life[LEASES];
byte planned[LEASES];         /* plans so far, over all epochs: the next plan's k */
byte before[LEASES];          /* plans before this epoch: step number = k + 1 - before */
byte settled[LEASES];         /* plans whose steps were reported */
byte known[LEASES];           /* plans whose outcome is known: reported, or doomed */
byte changes[LEASES];         /* table entries that the next grant has to tell */
byte asked[LEASES];           /* ghost: plans that the client wanted */

#define NOBODY   0
#define SEQUENCE 1
#define RELEASED 2            /* its row waits for the step that tells the worker */

byte holds[LEASES * SEQS];
byte code[LEASES * SEQS];
byte length[LEASES * SEQS];       /* tokens */
byte scheduled[LEASES * SEQS];    /* tokens */
byte computed[LEASES * SEQS];     /* tokens */
byte num_published[LEASES * SEQS];/* blocks */
byte table_length[LEASES * SEQS];
byte table[LEASES * SEQS * PLACES];

#define HELD(l, q)    (holds[SEQ(l, q)] == SEQUENCE)
#define STAYS(l, q)   (HELD(l, q) && !(c_release & BIT(q)))
#define IS_CACHED(m, b) ((b) <= BLOCKS && STATE(m, (b) % (BLOCKS + 1)) == CACHED)
#define HAS_CACHED(m) (IS_CACHED(m, 1) || IS_CACHED(m, 2) || IS_CACHED(m, 3) || IS_CACHED(m, 4) || IS_CACHED(m, 5))
#define IN_FLIGHT(l)  (planned[l] - settled[l])
#define may_plan(l)   (life[l] == OPEN && alive[MANAGER(l)] && !WAITS)

#if DRAFTS
byte drafts[LEASES * SEQS];   /* the draft in flight: 1 or 2, as the token is; it is not one of the tokens above */
#define DRAFT(s) drafts[s]
#else
#define DRAFT(s) 0
#endif

typedef StepInFlight {
#if DRAFTS
    byte drafts;              /* sequences whose runs end with a draft */
#endif
    byte pinned;              /* blocks that wait for its end */
    byte frees;               /* sequences whose rows do */
    bit has_runs;
    bit doomed;
    byte start[SEQS];
    byte end[SEQS]            /* what counts of the run, less after a trim; 0: no run */
}
StepInFlight step[SLOTS];

/* -- a grant, as the client has it --------------------------------------------------------------------------------- */

typedef Grant {
    byte copies;              /* that are still to reach the worker */
    byte epoch;
    byte signed_by;
    byte number;
    byte known;               /* known_step_number */
    byte released;            /* sequences */
    byte written;             /* which entries of `table` are told; the others are a ghost: what cachemgr has */
    byte passed;              /* entries that become the null block */
    byte table[SEQS * PLACES];
    byte copy_from[SEQS * GROUPS];
    byte copy_to[SEQS * GROUPS];
    byte start[SEQS];
    byte end[SEQS];           /* 0: no run */
    byte code[SEQS];          /* the sequence's first `end` tokens */
#if DRAFTS
    byte drafts;              /* sequences whose last token of these is a draft */
#endif
    byte fresh;               /* ghost: blocks handed out by it */
    byte touches;             /* ghost: blocks that its execution reads or writes */
    bit reused                /* ghost: one of those was handed out since */
}
Grant grant[SLOTS];

/* -- streams: what a break leaves on the way up may still be heard ---------- */

mtype = {ATTACHED, NEW_EPOCH, OPEN_LEASE, FENCE_LEASE, ACKNOWLEDGED, REPORT, LEASE_OPENED, LEASE_FENCED, STEP, FENCE,
    BEGIN};
#define COMPUTED 0
#define FAILED   1
#define SKIPPED  2
#define SHORTER  3            /* computed, and the drafts were not the tokens in their places */
#define IS_COMPUTED(o) ((o) == COMPUTED || (o) == SHORTER)

chan up0 = [QUEUE] of {mtype, byte, byte, byte};
chan up1 = [QUEUE] of {mtype, byte, byte, byte};
chan down0 = [QUEUE] of {mtype, byte, byte};
chan down1 = [QUEUE] of {mtype, byte, byte};
byte talks_to[3];             /* a stream's manager, NONE if there is no stream */
byte talks_of[3];             /* the epoch that was registered on it */

/* -- the worker ---------- */

byte epoch, last_epoch;
byte highest_term, attached_term;
#if AHEAD
byte obeyed_last;             /* 1 + the manager whose term is the highest; 0: it is no more */
#endif
byte key;                     /* whose grants are taken; NONE */
byte stream;                  /* the one it reads */
bit sending;                  /* whether reports go there at once: after Attached */
byte next_step[LEASES];       /* 0: not open */
byte fencing;                 /* leases whose fence has to be answered on this stream */
chan thread = [QUEUE] of {mtype, byte};
chan kept = [QUEUE] of {byte, byte};      /* reports: step, outcome */
byte first_kept;              /* the number of the oldest, less 1 */

byte rows[LEASES * SEQS * PLACES];     /* block tables, on the device */
byte last_failed[LEASES];             /* step number */
byte kv[(BLOCKS + 1) * BLOCK_SIZE];
byte executed_epoch;          /* ghost: of the step that ran last */

/* -- memory that outlives the worker (memory.pml) ---------- */

#if HOLDER
byte memory = 1, last_memory = HOLDER;  /* its identity */
byte kept_epoch, kept_term, kept_steps; /* in it: the epoch that was attached last, the term, steps accepted */
byte whole;                             /* in it: blocks with a checksum */
bit is_found;                           /* an earlier worker's, and no cachemgr has attached this one yet */
byte memory_of[MANAGERS];               /* that of a manager's books */
byte num_planned[MANAGERS];             /* steps of the epoch */
byte changes_left = CHANGES, c_memory, c_interrupts, c_damaged;
#endif
#if HOLDER > 1
byte other_memory = 2, other_kept_epoch, other_kept_term, other_kept_steps, other_whole;
byte other_kv[(BLOCKS + 1) * BLOCK_SIZE];
#endif

/* -- a state that is behind (restart.pml) ---------- */

#if BEHIND
bit is_unseen;                /* since cachemgr died the worker has not registered */
#define ARE_UNSEEN (is_unseen)
#else
#define ARE_UNSEEN 0
#endif
#define WAITS (ARE_UNSEEN && FAULT != FAULT_PLANNED_UNCHECKED)

#if BEHIND
#if IS_STALE
#define NOTHING_COPIED 255
#else
#define NOTHING_COPIED 0
#endif
#if LEASES > 3
#error "NOTHING_IN_FLIGHT looks at 3 leases"
#endif
#define NOTHING_IN_FLIGHT (IN_FLIGHT(0) == 0 && IN_FLIGHT(1 % LEASES) == 0 && IN_FLIGHT(2 % LEASES) == 0)
byte lost = NOTHING_COPIED;   /* ghost: slots of steps that were granted and that the books do not know */
#endif

/* -- budgets and choices ------------------------------------------------------------------------------------------- */

byte breaks = BREAKS, restarts = RESTARTS, damages = DAMAGES, deaths = DEATHS, failures = FAILURES, skips = SKIPS;
byte repeats = REPEATS;
byte c_items, c_release, c_trim, c_trim_to, c_fork, c_fork_at, c_extend, c_token, c_admit, c_evict, c_outcome;
#if DRAFTS
byte c_draft;
#endif

/* Scratch of a single d_step. */
hidden byte m, n, last, pins, count, b, found, victim, x, outcome, number;
hidden byte i1, i2, i3, i4, i5, i6, i7, i8, e1, q1, q2, q3, s1, s2, s3, g1, g2, h1, need, child, from, to, first;
hidden byte ok, least, lacks, has_draft, carried;
hidden byte kind;

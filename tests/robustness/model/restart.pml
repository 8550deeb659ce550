/* cachemgr 0 comes back after its death: warm, with the books that were written down, or cold. cachemgr/{state,catalog}.py.

   Every change is written before anything of it goes out. So a death between a change and its writing is a death before
   the change, and the books of a dead cachemgr, left as they are, are those that are written down. What BEHIND and some
   faults add is what that rule prevents: a change whose effects went out, and which the books come back without. */

#if RETURNS

#define NEXT_TERM ((MANAGERS > 1 && alive[MANAGERS - 1] -> MAX(term[0], term[MANAGERS - 1]) : term[0]) + 1)

/* Leases whose holder was not told go on, too; they end when their time is over. */
inline return_warm() {
    m = 0;
#if IS_STALE
    if
    :: lost != NOTHING_COPIED -> put_back_books()
    :: else
    fi;
#endif
    start_again();
    for (e1 : 0 .. LEASES - 1) {
        if
        :: MANAGER(e1) == 0 && life[e1] == OPENING -> life[e1] = OPEN
        :: else
        fi
    }
    ruled[0] = (FAULT == FAULT_TERMS_FORGOTTEN -> RULED_BY(term[0]) : ruled[0] | BIT(term[0]));
    printf("cachemgr 0 starts again with its books of epoch %d\n", epoch_of[0])
}

inline return_cold() {
    m = 0;
    start_again();
    lose_books();
    printf("cachemgr 0 starts again without books\n")
}

inline start_again() {
    x = NEXT_TERM;
    term[0] = x;
    alive[0] = 1
}

#endif

/* -- books that are behind, of the one manager there is ------------------------------------------------------------ */

#if BEHIND

#if IS_STALE
#define KEPT
#else
#define KEPT hidden           /* no longer than a d_step */
#endif

KEPT byte old_epoch, old_ruled, old_entered;
KEPT byte old_state[BLOCKS + 1], old_ref[BLOCKS + 1], old_published[BLOCKS + 1];
KEPT byte old_life[LEASES], old_planned[LEASES], old_before[LEASES], old_changes[LEASES];
KEPT byte old_holds[LEASES * SEQS], old_code[LEASES * SEQS], old_length[LEASES * SEQS], old_scheduled[LEASES * SEQS];
KEPT byte old_computed[LEASES * SEQS], old_num_published[LEASES * SEQS], old_table_length[LEASES * SEQS];
KEPT byte old_table[LEASES * SEQS * PLACES];

#define COPY(target, source, size) for (i1 : 0 .. (size) - 1) { target[i1] = source[i1] }

/* Of leases without steps in flight. */
inline copy_books() {
    old_epoch = epoch_of[0]; old_ruled = ruled[0]; old_entered = entered[0];
    COPY(old_state, state, BLOCKS + 1);
    COPY(old_ref, ref, BLOCKS + 1);
    COPY(old_published, published, BLOCKS + 1);
    COPY(old_life, life, LEASES);
    COPY(old_planned, planned, LEASES);
    COPY(old_before, before, LEASES);
    COPY(old_changes, changes, LEASES);
    COPY(old_holds, holds, LEASES * SEQS);
    COPY(old_code, code, LEASES * SEQS);
    COPY(old_length, length, LEASES * SEQS);
    COPY(old_scheduled, scheduled, LEASES * SEQS);
    COPY(old_computed, computed, LEASES * SEQS);
    COPY(old_num_published, num_published, LEASES * SEQS);
    COPY(old_table_length, table_length, LEASES * SEQS);
    COPY(old_table, table, LEASES * SEQS * PLACES);
    lost = 0
}

/* The numbers of the steps planned since are given once more; their slots are not, for their grants are still about. */
inline put_back_books() {
    epoch_of[0] = old_epoch; ruled[0] = old_ruled; entered[0] = old_entered;
    COPY(state, old_state, BLOCKS + 1);
    COPY(ref, old_ref, BLOCKS + 1);
    COPY(published, old_published, BLOCKS + 1);
    COPY(life, old_life, LEASES);
    COPY(changes, old_changes, LEASES);
    COPY(holds, old_holds, LEASES * SEQS);
    COPY(code, old_code, LEASES * SEQS);
    COPY(length, old_length, LEASES * SEQS);
    COPY(scheduled, old_scheduled, LEASES * SEQS);
    COPY(computed, old_computed, LEASES * SEQS);
    COPY(num_published, old_num_published, LEASES * SEQS);
    COPY(table_length, old_table_length, LEASES * SEQS);
    COPY(table, old_table, LEASES * SEQS * PLACES);
    for (i1 : 0 .. LEASES - 1) {
        before[i1] = old_before[i1] + planned[i1] - old_planned[i1];
        for (g1 : 0 .. STEPS - 1) {
            if
            :: g1 >= old_planned[i1] && g1 < planned[i1] ->
                lost = lost | BIT(SLOT(i1, g1)); clear_step(SLOT(i1, g1));
                settled[i1] = planned[i1]; known[i1] = planned[i1]
            :: else
            fi
        }
    }
}

/* The plan is answered, cachemgr dies before it is written. */
inline plan_unwritten(l) {
    copy_books();
    asked[l]++;
    plan_step(l);
    put_back_books();
    printf("cachemgr 0 has not written that, and dies\n");
    kill_manager(0)
}

/* Orders and acknowledgements get to the worker at once: on this stream nothing is before them. */
#define IS_HEARD_AT_ONCE (deaths > 0 && alive[0] && stream != NO_STREAM && current[0] == stream && sending && \
    len(down0) == 0 && len(down1) == 0)

inline create_unwritten(l) {
    printf("cachemgr 0 makes lease %d, has not written that, and dies\n", l);
    life[l] = GONE;
    next_step[l] = 1;
    kill_manager(0)
}

inline end_unwritten(l) {
    printf("cachemgr 0 ends lease %d, has not written that, and dies\n", l);
    fence(l);
    kill_manager(0)
}

inline settle_unwritten() {
    printf("cachemgr 0 acknowledges report %d, has not written that, and dies\n", number);
    acknowledge(number);
    kill_manager(0)
}

/* The grant of a plan that was not written gets to the worker before it registers, or never. */
inline is_seen() {
    is_unseen = 0;
    for (g1 : 0 .. SLOTS - 1) {
        if
        :: (lost & BIT(g1)) && !COMES_LATE -> grant[g1].copies = 0
        :: else
        fi
    }
}

#endif

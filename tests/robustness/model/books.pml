/* cachemgr's books: what is in cachemgr/core/src/{pool,planner,settle,steps}.rs, item by item and in its order.

   Everything here runs inside of a d_step, with m the manager. n is the plan being made, `last` the last step in flight
   before it. Reference counts are counted as the code does; pins are sets, one per step in flight. */

/* -- the pool ------------------------------------------------------------------------------------------------------ */

inline find_pins() {
    pins = 0;
    for (i8 : 0 .. SLOTS - 1) {
        if
        :: MANAGER(LEASE(i8)) == m -> pins = pins | step[i8].pinned
        :: else
        fi
    }
}

/* Blocks that nobody holds are retired, cached or free. */
inline rest_all() {
    find_pins();
    for (i7 : 1 .. BLOCKS) {
        if
        :: REF(m, i7) > 0
        :: REF(m, i7) == 0 && (pins & BIT(i7)) -> STATE(m, i7) = RETIRED
        :: REF(m, i7) == 0 && !(pins & BIT(i7)) && PUBLISHED(m, i7) -> STATE(m, i7) = CACHED
        :: else -> STATE(m, i7) = FREE
        fi
    }
}

inline count_allocatable() {
    count = 0;
    for (i7 : 1 .. BLOCKS) {
        if
        :: STATE(m, i7) == FREE || (STATE(m, i7) == CACHED && FAULT != FAULT_CACHED_KEPT) -> count++
        :: else
        fi
    }
}

/* One reference less; it is not handed out before this step has ended. */
inline let_go(block, pin_to) {
    REF(m, block)--;
    if
    :: pin_to != NO_STEP && FAULT != FAULT_NO_RETIRED_STATE -> step[pin_to].pinned = step[pin_to].pinned | BIT(block)
    :: else
    fi
}

inline acquire(block) {
    if
    :: STATE(m, block) == RETIRED -> MARK(REACH_RETIRED_ACQUIRED)
    :: else
    fi;
    REF(m, block)++;
    STATE(m, block) = (FAULT == FAULT_FOUND_STILL_EVICTABLE && STATE(m, block) == CACHED -> CACHED : ACTIVE)
}

/* A block without content, or the one that is given up; there is one. It is `found`. */
inline allocate() {
    found = 0;
    for (i6 : 1 .. BLOCKS) {
        if
        :: found == 0 && STATE(m, i6) == FREE -> found = i6
        :: else
        fi
    }
    if
    :: found == 0 ->
        for (i6 : 0 .. BLOCKS - 1) {
            victim = (c_evict + i6 - 1) % BLOCKS + 1;
            if
            :: found == 0 && STATE(m, victim) == CACHED -> found = victim
            :: else
            fi
        }
        MARK(REACH_EVICTION);
        PUBLISHED(m, found) = 0
    :: else
    fi;
    REF(m, found) = 1;
    STATE(m, found) = ACTIVE;
    grant[n].fresh = grant[n].fresh | BIT(found);
    for (i6 : 0 .. SLOTS - 1) {
        if
        :: grant[i6].epoch == epoch_of[m] && grant[i6].signed_by == m && (grant[i6].touches & BIT(found)) ->
            grant[i6].reused = 1
        :: else
        fi
    }
}

/* -- a plan -------------------------------------------------------------------------------------------------------- */

inline plan_step(l) {
    m = MANAGER(l);
    n = SLOT(l, planned[l]);
    last = (IN_FLIGHT(l) > 0 -> n - 1 : NO_STEP);
    if
    :: IN_FLIGHT(l) == 2 -> MARK(REACH_THREE_STEPS)
    :: else
    fi;
    if
    :: FAULT == FAULT_PINNED_TOO_SHORT && last != NO_STEP -> last = SLOT(l, settled[l])
    :: else
    fi;
    grant[n].copies = COPIES;
    grant[n].epoch = epoch_of[m];
    grant[n].signed_by = m;
    grant[n].number = planned[l] + 1 - before[l];
    grant[n].known = known[l] - before[l];
    for (q1 : 0 .. SEQS - 1) {
        if
        :: c_release & BIT(q1) -> release(l)
        :: else
        fi
    }
    if
    :: FAULT == FAULT_WRITTEN_BEFORE_PASSED -> tell_changes(l)
    :: else
    fi;
    pass_windows(l);
    tell_changes(l);
    rest_all();
    if
    :: c_trim -> q1 = c_trim - 1; if :: !DRAFT(SEQ(l, q1)) -> trim(l) :: else fi
    :: else
    fi;
    if
    :: c_fork -> q1 = c_fork - 1; if :: !DRAFT(SEQ(l, q1)) -> fork(l) :: else fi
    :: else
    fi;
    for (q1 : 0 .. SEQS - 1) {
        if
        :: (c_extend & BIT(q1)) && HELD(l, q1) && (!DRAFT(SEQ(l, q1)) || FAULT == FAULT_DRAFT_BUILT_ON) ->
#if FAULT == FAULT_DRAFT_BUILT_ON
            s1 = SEQ(l, q1);
            if
            :: DRAFT(s1) -> take_draft()
            :: else
            fi;
#endif
            extend(l)
        :: else
        fi
    }
    for (q1 : 0 .. SEQS - 1) {
        if
        :: HELD(l, q1) && grant[n].end[q1] -> schedule(l)
        :: else
        fi
    }
    if
    :: c_admit -> admit(l)
    :: else
    fi;
    planned[l]++;
#if HOLDER
    num_planned[m]++;
#endif
    REQUIRE(planned[l] <= asked[l], I7);
    write_ghosts(l);
    say_plan(l);
    c_items = 0; c_release = 0; c_trim = 0; c_trim_to = 0; c_fork = 0; c_fork_at = 0; c_extend = 0; c_token = 0;
    c_admit = 0; c_evict = 0;
#if DRAFTS
    c_draft = 0;
#endif
    skip
}

inline say_plan(l) {
    printf("cachemgr %d plans step %d of lease %d: epoch %d, known %d, releases %d",
           m, grant[n].number, l, grant[n].epoch, grant[n].known, grant[n].released);
    for (q1 : 0 .. SEQS - 1) {
        for (i1 : 0 .. GROUPS - 1) {
            if
            :: grant[n].copy_to[q1 * GROUPS + i1] ->
                printf(", copies %d to %d", grant[n].copy_from[q1 * GROUPS + i1], grant[n].copy_to[q1 * GROUPS + i1])
            :: else
            fi
        }
        if
        :: grant[n].end[q1] -> printf(", runs sequence %d from %d to %d", q1, grant[n].start[q1], grant[n].end[q1])
        :: else
        fi;
        for (i1 : 0 .. PLACES - 1) {
            if
            :: grant[n].table[q1 * PLACES + i1] ->
                printf(", block %d is in %d[%d]", grant[n].table[q1 * PLACES + i1], q1, i1)
            :: (grant[n].passed & BIT(q1 * PLACES + i1)) -> printf(", %d[%d] is passed", q1, i1)
            :: else
            fi
        }
    }
    printf("\n")
}

inline release(l) {
    s1 = SEQ(l, q1);
    for (i1 : 0 .. PLACES - 1) {
        if
        :: HAS(s1, i1) -> let_go(table[AT(s1, i1)], last)
        :: else
        fi
    }
    holds[s1] = RELEASED;
    step[n].frees = step[n].frees | BIT(q1);
    grant[n].released = grant[n].released | BIT(q1)
}

/* No later token sees these blocks. The last computed token may be computed again. */
inline pass_windows(l) {
#if WINDOW
    for (q1 : 0 .. SEQS - 1) {
        s1 = SEQ(l, q1);
        to = (FAULT == FAULT_PASSED_BY_SCHEDULED -> scheduled[s1] : computed[s1]);
        for (i1 : TABLE .. PLACES - 1) {
            if
            :: HELD(l, q1) && HAS(s1, i1) && to > 0 && INDEX(i1) < FIRST_NEEDED(i1, to - 1) ->
                MARK(REACH_PASSED);
                if
                :: last != NO_STEP -> MARK(REACH_PASSED_IN_FLIGHT)
                :: else
                fi;
                let_go(table[AT(s1, i1)], last);
                table[AT(s1, i1)] = 0;
                grant[n].passed = grant[n].passed | BIT(q1 * PLACES + i1)
            :: else
            fi
        }
    }
#else
    skip
#endif
}

/* Positions before this one can't be computed again: blocks that they see are gone. It is `least`. */
inline find_least(s) {
    least = 0;
#if WINDOW
    for (i1 : TABLE .. PLACES - 1) {
        if
        :: INDEX(i1) < table_length[s] && table[AT(s, i1)] == 0 && FAULT != FAULT_LOST_POSITION ->
            least = (INDEX(i1) + 1) * BLOCK_SIZE + WINDOW - 1
        :: else
        fi
    }
#endif
}

inline tell_changes(l) {
    for (q1 : 0 .. SEQS - 1) {
        for (i1 : 0 .. PLACES - 1) {
            if
            :: (changes[l] & BIT(q1 * PLACES + i1)) && HELD(l, q1) && HAS(SEQ(l, q1), i1) &&
                FAULT != FAULT_CHANGES_NOT_TOLD ->
                tell(q1, i1)
            :: else
            fi
        }
    }
    changes[l] = 0
}

inline tell(q, i) { grant[n].written = grant[n].written | BIT((q) * PLACES + (i)) }

inline trim(l) {
    s1 = SEQ(l, q1);
    find_least(s1);
    if
    :: c_trim_to >= least -> trim_to(l)
    :: else -> MARK(REACH_POSITION_LOST)
    fi
}

inline trim_to(l) {
    code[s1] = PREFIX(code[s1], length[s1], c_trim_to);
    length[s1] = c_trim_to;
    computed[s1] = MIN(computed[s1], c_trim_to);
    scheduled[s1] = MIN(scheduled[s1], c_trim_to);
    num_published[s1] = MIN(num_published[s1], c_trim_to / BLOCK_SIZE);
    for (i1 : 0 .. PLACES - 1) {
        if
        :: INDEX(i1) >= NUM_BLOCKS(c_trim_to) && HAS(s1, i1) -> let_go(table[AT(s1, i1)], last); table[AT(s1, i1)] = 0
        :: else
        fi
    }
    table_length[s1] = MIN(table_length[s1], NUM_BLOCKS(c_trim_to));
    if
    :: FAULT != FAULT_TRIM_KEEPS_CLAIM -> limit_runs(l, q1, c_trim_to)
    :: else
    fi;
    rest_all()
}

/* What steps in flight compute of a sequence counts only up to here. */
inline limit_runs(l, q, num_tokens) {
    for (g1 : 0 .. STEPS - 1) {
        if
        :: g1 >= settled[l] && g1 <= planned[l] -> step[SLOT(l, g1)].end[q] = MIN(step[SLOT(l, g1)].end[q], num_tokens)
        :: else
        fi
    }
}

/* The child has the parent's blocks and computes its last token again. */
inline fork(l) {
    find_unused(l);
    find_least(SEQ(l, q1));
    if
    :: child != NONE && c_fork_at <= length[SEQ(l, q1)] && c_fork_at > least ->  /* a trim in the same plan may have left it shorter */
        s1 = SEQ(l, q1); s2 = SEQ(l, child);
        holds[s2] = SEQUENCE;
        code[s2] = PREFIX(code[s1], length[s1], c_fork_at);
        length[s2] = c_fork_at;
        scheduled[s2] = MIN(scheduled[s1], c_fork_at - 1);
        computed[s2] = MIN(computed[s1], scheduled[s2]);
        num_published[s2] = MIN(num_published[s1], scheduled[s2] / BLOCK_SIZE);
        table_length[s2] = MIN(table_length[s1], NUM_BLOCKS(c_fork_at));
        for (i1 : 0 .. PLACES - 1) {
            if
            :: INDEX(i1) < table_length[s2] && table[AT(s1, i1)] ->
                table[AT(s2, i1)] = table[AT(s1, i1)]; acquire(table[AT(s1, i1)]); tell(child, i1)
            :: else
            fi
        }
    :: else
    fi
}

inline find_unused(l) {
    child = NONE;
    for (q2 : 0 .. SEQS - 1) {
        if
        :: child == NONE && holds[SEQ(l, q2)] == NOBODY -> child = q2
        :: else
        fi
    }
}

/* Room for the sequence's next tokens: those that are waiting, or else a new one. Refused if there is too little. */
inline extend(l) {
    s1 = SEQ(l, q1);
    from = scheduled[s1];
    to = (from < length[s1] -> length[s1] : length[s1] + 1);
    add_draft();
    if
    :: to <= BLOCK_SIZE * TABLE ->
        make_writable(l);
        if
        :: ok && to - has_draft > length[s1] -> code[s1] = code[s1] * 2 + c_token - 1; length[s1] = to - has_draft
        :: else
        fi;
        if
        :: ok && has_draft -> keep_draft()
        :: else
        fi;
        if
        :: ok -> grant[n].start[q1] = from; grant[n].end[q1] = to
        :: else
        fi
    :: else
    fi
}

/* One token is left to compute, the last one: a guess at the next one may be computed with it. */
inline add_draft() {
    has_draft = 0;
#if DRAFTS
    if
    :: c_draft && to == from + 1 && to < BLOCK_SIZE * TABLE -> has_draft = 1; to++
    :: else
    fi
#endif
}

/* Until the outcome of this step is known, nothing but a release changes the sequence. */
inline keep_draft() {
#if DRAFTS
    drafts[s1] = c_draft;
    step[n].drafts = step[n].drafts | BIT(q1);
    grant[n].drafts = grant[n].drafts | BIT(q1)
#else
    skip
#endif
}

/* It was accepted: it is one of the tokens. */
inline take_draft() {
    code[s1] = code[s1] * 2 + DRAFT(s1) - 1;
    length[s1]++;
    forget_draft(s1)
}

inline forget_draft(s) {
#if DRAFTS
    drafts[s] = 0
#else
    skip
#endif
}

#if FAULT == FAULT_WRITE_SHARED
#define IS_FOREIGN(block) 0
#else
#define IS_FOREIGN(block) ((block) && (REF(m, block) != 1 || PUBLISHED(m, block) != 0))
#endif

inline make_writable(l) {
    need = GROUPS * (NUM_BLOCKS(to) - MIN(NUM_BLOCKS(to), table_length[s1]));
    for (i1 : 0 .. PLACES - 1) {
        if
        :: INDEX(i1) >= from / BLOCK_SIZE && INDEX(i1) < MIN(NUM_BLOCKS(to), table_length[s1]) && IS_FOREIGN(table[AT(s1, i1)]) ->
            need++
        :: else
        fi
    }
    count_allocatable();
    ok = (need <= count);
    if
    :: ok ->
        for (i1 : 0 .. PLACES - 1) {
            b = table[AT(s1, i1)];
            if
            :: INDEX(i1) >= from / BLOCK_SIZE && INDEX(i1) < MIN(NUM_BLOCKS(to), table_length[s1]) && IS_FOREIGN(b) ->
                allocate();
                table[AT(s1, i1)] = found;
                tell(q1, i1);
                if
                :: INDEX(i1) * BLOCK_SIZE < from ->
                    grant[n].copy_from[q1 * GROUPS + GROUP(i1)] = b;
                    grant[n].copy_to[q1 * GROUPS + GROUP(i1)] = found;
                    let_go(b, (FAULT == FAULT_COPY_SOURCE_NOT_PINNED -> NO_STEP : n))
                :: else -> let_go(b, last)
                fi
            :: INDEX(i1) >= from / BLOCK_SIZE && INDEX(i1) < MIN(NUM_BLOCKS(to), table_length[s1]) && !IS_FOREIGN(b) ->
                forget_claims(l)
            :: INDEX(i1) >= table_length[s1] && INDEX(i1) < NUM_BLOCKS(to) -> allocate(); table[AT(s1, i1)] = found; tell(q1, i1)
            :: else
            fi
        }
        if
        :: table_length[s1] < NUM_BLOCKS(to) -> table_length[s1] = NUM_BLOCKS(to)
        :: else
        fi;
        rest_all()
    :: else -> check_refusal()
    fi
}

/* Refused for want of blocks: there are fewer than `need` that nobody holds and no step needs. */
inline check_refusal() {
    find_pins();
    count = 0;
    for (i6 : 1 .. BLOCKS) { count = count + (REF(m, i6) == 0 && !(pins & BIT(i6))) }
    REQUIRE(count < need, I7);
    if
    :: pins && need <= BLOCKS -> MARK(REACH_WAITS_FOR_RETIRED)
    :: else
    fi
}

/* A released sequence shared block b, which is to be written again: its runs in flight do not publish it. */
inline forget_claims(l) {
    for (q3 : 0 .. SEQS - 1) {
        s3 = SEQ(l, q3);
        for (i5 : 0 .. PLACES - 1) {
            if
            :: holds[s3] == RELEASED && INDEX(i5) < table_length[s3] && table[AT(s3, i5)] == b &&
                FAULT != FAULT_CLAIM_OF_RELEASED ->
                MARK(REACH_CLAIM_FORGOTTEN);
                limit_runs(l, q3, INDEX(i5) * BLOCK_SIZE)
            :: else
            fi
        }
    }
}

inline schedule(l) {
    s1 = SEQ(l, q1);
    from = grant[n].start[q1]; to = grant[n].end[q1];
    for (i1 : 0 .. PLACES - 1) {
        if
        :: INDEX(i1) >= from / BLOCK_SIZE && INDEX(i1) < NUM_BLOCKS(to) ->
            REQUIRE(REF(m, table[AT(s1, i1)]) == 1 && PUBLISHED(m, table[AT(s1, i1)]) == 0, I3)
        :: else
        fi
    }
    scheduled[s1] = to;
    grant[n].code[q1] = (to > length[s1] -> code[s1] * 2 + DRAFT(s1) - 1 : PREFIX(code[s1], length[s1], to));
    step[n].start[q1] = from; step[n].end[q1] = to;
    step[n].has_runs = 1;
    if
    :: FAULT == FAULT_PUBLISH_AT_ALLOCATION -> publish_run(l, q1, to)
    :: else
    fi
}

inline admit(l) {
    find_unused(l);
    if
    :: child != NONE ->
        q1 = child; s1 = SEQ(l, q1);
        code[s1] = (c_admit == 1 -> BIT(PROMPT) : BIT(PROMPT + 1) - 1);
        length[s1] = PROMPT;
        find_prefix(l);
        count_allocatable();
        if
        :: GROUPS * (NUM_BLOCKS(PROMPT) - first) <= count - need ->
            holds[s1] = SEQUENCE;
            computed[s1] = num_published[s1] * BLOCK_SIZE;
            table_length[s1] = NUM_BLOCKS(PROMPT);
            for (i1 : 0 .. PLACES - 1) {
                if
                :: INDEX(i1) < first && table[AT(s1, i1)] -> acquire(table[AT(s1, i1)]); tell(q1, i1)
                :: else
                fi
            }
            for (i1 : 0 .. PLACES - 1) {
                if
                :: INDEX(i1) >= first && INDEX(i1) < NUM_BLOCKS(PROMPT) -> allocate(); table[AT(s1, i1)] = found; tell(q1, i1)
                :: else
                fi
            }
            grant[n].start[q1] = first * BLOCK_SIZE; grant[n].end[q1] = PROMPT;
            schedule(l)
        :: else ->
            need = GROUPS * (NUM_BLOCKS(PROMPT) - first) + need;
            check_refusal();
            clear_sequence(s1)
        fi
    :: else
    fi
}

#define MOST_FOUND ((PROMPT - 1) / BLOCK_SIZE)

/* The longest known prefix: published blocks, and such as steps in flight of this lease, or this one, fill. `first` is
   the number of blocks found, `need` how many of them are cached: taking them leaves less for others. */
inline find_prefix(l) {
    first = 0; need = 0;
    for (i3 : 1 .. MOST_FOUND) { find_hit(l) }
    num_published[s1] = first;
    for (i1 : 0 .. PLACES - 1) {
        if
        :: INDEX(i1) < first && INDEX(i1) >= FIRST_NEEDED(i1, first * BLOCK_SIZE) ->
            find_known(l);
            mark_shared(l);
            table[AT(s1, i1)] = found;
            need = need + (found && STATE(m, found) == CACHED);
            if
            :: GROUP(i1) -> MARK(REACH_WINDOW_HIT)
            :: else
            fi
        :: else
        fi
    }
    for (i3 : 0 .. MOST_FOUND - 1) {
        if
        :: i3 == first -> find_shareable(l)
        :: else
        fi
    }
}

/* A prefix of i3 blocks is one if the full group has them all, and the other one has those that the next token sees. */
inline find_hit(l) {
    ok = 1;
    for (i1 : 0 .. PLACES - 1) {
        if
        :: INDEX(i1) < i3 && INDEX(i1) >= FIRST_NEEDED(i1, i3 * BLOCK_SIZE) ->
            find_known(l);
            if
            :: !found && GROUP(i1) && ok -> MARK(REACH_WINDOW_GONE)
            :: else
            fi;
            ok = ok && (found || (FAULT == FAULT_WINDOW_MISSED && GROUP(i1)))
        :: else
        fi
    }
    if
    :: ok -> first = i3
    :: else
    fi
}

inline find_known(l) {
    h1 = HASH(HASH_SPACE(l, i1), PREFIX(code[s1], PROMPT, (INDEX(i1) + 1) * BLOCK_SIZE));
    find_published()
}

/* One block more, of every group. */
inline find_shareable(l) {
    ok = 1;
    for (i1 : 0 .. PLACES - 1) {
        if
        :: INDEX(i1) == i3 ->
            find_known(l);
            if
            :: found == 0 -> find_filled(l)
            :: else -> mark_shared(l)
            fi;
            table[AT(s1, i1)] = found;
            ok = ok && found
        :: else
        fi
    }
    for (i1 : 0 .. PLACES - 1) {
        if
        :: INDEX(i1) == i3 && ok -> need = need + (STATE(m, table[AT(s1, i1)]) == CACHED)
        :: INDEX(i1) == i3 && !ok -> table[AT(s1, i1)] = 0
        :: else
        fi
    }
    first = first + ok
}

inline find_published() {
    found = 0;
    for (i6 : 1 .. BLOCKS) {
        if
        :: PUBLISHED(m, i6) == h1 -> found = i6
        :: else
        fi
    }
}

/* A block is filled with known tokens; a draft is none. */
#if FAULT == FAULT_DRAFT_SHARED
#define FILL_LENGTH(s) (length[s] + (DRAFT(s) > 0))
#define FILL_CODE(s)   (DRAFT(s) -> code[s] * 2 + DRAFT(s) - 1 : code[s])
#else
#define FILL_LENGTH(s) length[s]
#define FILL_CODE(s)   code[s]
#endif

inline find_filled(l) {
    for (g1 : 0 .. STEPS - 1) {
        for (q2 : 0 .. SEQS - 1) {
            s2 = SEQ(l, q2); g2 = SLOT(l, g1);
            if
            :: found == 0 && g1 >= settled[l] && g1 <= planned[l] && (!step[g2].doomed || FAULT ==
                FAULT_DOOMED_SHARED) &&
               step[g2].end[q2] && INDEX(i1) >= step[g2].start[q2] / BLOCK_SIZE &&
               INDEX(i1) < MIN(step[g2].end[q2], FILL_LENGTH(s2)) / BLOCK_SIZE &&
               HASH(HASH_SPACE(l, i1), PREFIX(FILL_CODE(s2), FILL_LENGTH(s2), (INDEX(i1) + 1) * BLOCK_SIZE)) == h1 &&
               (STATE(m, table[AT(s2, i1)]) == ACTIVE || PUBLISHED(m, table[AT(s2, i1)])) ->
                found = table[AT(s2, i1)];
                MARK(REACH_SHARED_UNFINISHED)
            :: else
            fi
        }
    }
}

inline mark_shared(l) {
#ifdef COVERAGE
    for (s3 : 0 .. LEASES * SEQS - 1) {
        if
        :: LEASE_OF(s3) != l && holds[s3] == SEQUENCE && table[AT(s3, i1)] == found -> MARK(REACH_SHARED_ACROSS_LEASES)
        :: else
        fi
    }
#else
    skip
#endif
}

/* What the worker's own tables have to be when the step runs, and what the step touches. */
inline write_ghosts(l) {
    for (q1 : 0 .. SEQS - 1) {
        for (i1 : 0 .. PLACES - 1) {
            grant[n].table[q1 * PLACES + i1] = (HELD(l, q1) -> table[AT(SEQ(l, q1), i1)] : 0);
            if
            :: grant[n].end[q1] && INDEX(i1) < NUM_BLOCKS(grant[n].end[q1]) &&
                INDEX(i1) >= FIRST_NEEDED(i1, grant[n].start[q1]) ->
                grant[n].touches = grant[n].touches | BIT(table[AT(SEQ(l, q1), i1)])
            :: else
            fi
        }
    }
    for (i1 : 0 .. SEQS * GROUPS - 1) {
        if
        :: grant[n].copy_to[i1] ->
            grant[n].touches = grant[n].touches | BIT(grant[n].copy_from[i1]) | BIT(grant[n].copy_to[i1])
        :: else
        fi
    }
}

/* -- a report ------------------------------------------------------------------------------------------------------ */

/* How step n of lease l ended, entered into m's books. */
inline settle(l) {
    if
    :: MANAGER(l) != m || life[l] == GONE || life[l] == UNUSED  /* a lease that is gone, or another manager's */
    :: else ->
#if BEHIND
        REQUIRE(!(lost & BIT(n)) || lost == NOTHING_COPIED, REPORTS);
#endif
        if
        :: n < SLOT(l, settled[l])
        :: else ->
            REQUIRE(n == SLOT(l, settled[l]) && settled[l] < planned[l], REPORTS);
            REQUIRE(!IS_COMPUTED(outcome) || !step[n].doomed || !step[n].has_runs, REPORTS);
            settled[l]++;
            if
            :: known[l] < settled[l] -> known[l] = settled[l]
            :: else
            fi;
            last = (IN_FLIGHT(l) > 0 -> SLOT(l, planned[l] - 1) : NO_STEP);
            if
            :: IS_COMPUTED(outcome) || FAULT == FAULT_FAILED_IS_COMPUTED -> enter_computed(l)
            :: !IS_COMPUTED(outcome) && step[n].has_runs && !step[n].doomed && FAULT != FAULT_FAILED_IS_COMPUTED ->
                doom(l)
            :: else
            fi;
            finish(l)
        fi
    fi
}

inline enter_computed(l) {
    for (q1 : 0 .. SEQS - 1) {
        s1 = SEQ(l, q1);
        if
        :: step[n].end[q1] && !step[n].doomed ->
            settle_draft();
            if
            :: computed[s1] < step[n].end[q1] -> computed[s1] = step[n].end[q1]
            :: else
            fi;
            to = MIN(computed[s1], length[s1]);
            publish_run(l, q1, to)
        :: else
        fi
    }
}

/* A draft that was accepted becomes a token, and counts as computed; one that was not is as if it had never been. */
inline settle_draft() {
#if DRAFTS
    if
    :: !(step[n].drafts & BIT(q1)) || !DRAFT(s1)
    :: (step[n].drafts & BIT(q1)) && DRAFT(s1) && (outcome == COMPUTED || FAULT == FAULT_DRAFT_KEPT) ->
        MARK(REACH_DRAFT_ACCEPTED);
        if
        :: holds[s1] == RELEASED -> MARK(REACH_DRAFT_OF_RELEASED)
        :: else
        fi;
        take_draft()
    :: else ->
        MARK(REACH_DRAFT_REJECTED);
        forget_draft(s1);
        if
        :: FAULT != FAULT_DRAFT_COUNTED ->
            step[n].end[q1] = MIN(step[n].end[q1], length[s1]);
            scheduled[s1] = length[s1]
        :: else
        fi
    fi
#else
    skip
#endif
}

/* Full blocks before this position can be found from here on; where another block holds the same, take that. */
inline publish_run(l, q, num_tokens) {
    for (i1 : 0 .. PLACES - 1) {
        s1 = SEQ(l, q);
        b = table[AT(s1, i1)];
        if
        :: INDEX(i1) >= num_published[s1] && INDEX(i1) < (num_tokens) / BLOCK_SIZE && b ->
            h1 = HASH(HASH_SPACE(l, i1), PREFIX(code[s1], length[s1], (INDEX(i1) + 1) * BLOCK_SIZE));
            find_published();
            if
            :: found == 0 -> REQUIRE(PUBLISHED(m, b) == 0, I3); PUBLISHED(m, b) = h1
            :: found && found != b && holds[s1] == SEQUENCE ->
                MARK(REACH_BLOCK_SWAPPED);
                acquire(found);
                table[AT(s1, i1)] = found;
                changes[l] = changes[l] | BIT(q * PLACES + i1);
                if
                :: FAULT != FAULT_REFERENCE_LEFT -> let_go(b, last)
                :: else
                fi
            :: else
            fi
        :: else
        fi
    }
    num_published[s1] = MAX(num_published[s1], (num_tokens) / BLOCK_SIZE)
}

/* A step computed nothing: what was planned before that was known will compute nothing either. */
inline doom(l) {
    for (g1 : 0 .. STEPS - 1) {
        if
        :: g1 >= settled[l] && g1 < planned[l] -> step[SLOT(l, g1)].doomed = 1
        :: else
        fi
    }
    known[l] = planned[l];
    for (q1 : 0 .. SEQS - 1) {
        if
        :: HELD(l, q1) ->
            if
            :: DRAFT(SEQ(l, q1)) -> MARK(REACH_DRAFT_FAILED)
            :: else
            fi;
            scheduled[SEQ(l, q1)] = computed[SEQ(l, q1)]; forget_draft(SEQ(l, q1))
        :: else
        fi
    }
}

/* Nothing touches the step's blocks any more. */
inline finish(l) {
    for (q1 : 0 .. SEQS - 1) {
        if
        :: step[n].frees & BIT(q1) -> clear_sequence(SEQ(l, q1))
        :: else
        fi
    }
    clear_step(n);
    rest_all()
}

inline clear_step(g) {
    step[g].pinned = 0; step[g].frees = 0; step[g].has_runs = 0; step[g].doomed = 0;
#if DRAFTS
    step[g].drafts = 0;
#endif
    for (q2 : 0 .. SEQS - 1) { step[g].start[q2] = 0; step[g].end[q2] = 0 }
}

inline clear_sequence(s) {
    holds[s] = NOBODY; code[s] = 0; length[s] = 0; scheduled[s] = 0; computed[s] = 0; num_published[s] = 0;
    table_length[s] = 0;
    forget_draft(s);
    for (i5 : 0 .. PLACES - 1) { table[AT(s, i5)] = 0 }
}

/* All of a lease's blocks come back. */
inline close_lease(l) {
    for (q1 : 0 .. SEQS - 1) {
        s1 = SEQ(l, q1);
        for (i1 : 0 .. PLACES - 1) {
            if
            :: holds[s1] == SEQUENCE && HAS(s1, i1) -> REF(m, table[AT(s1, i1)])--
            :: else
            fi
        }
    }
    forget_holdings(l);
    life[l] = GONE;
    rest_all()
}

inline forget_holdings(l) {
    for (q1 : 0 .. SEQS - 1) { clear_sequence(SEQ(l, q1)) }
    for (g1 : 0 .. STEPS - 1) { clear_step(SLOT(l, g1)) }
    before[l] = planned[l]; settled[l] = planned[l]; known[l] = planned[l]; changes[l] = 0
}

/* -- what always holds --------------------------------------------------------------------------------------------- */

inline check_books(manager) {
    m = manager;
    find_pins();
    for (b : 1 .. BLOCKS) {
        REQUIRE((STATE(m, b) == ACTIVE) == (REF(m, b) > 0), I1);
        REQUIRE(STATE(m, b) != RETIRED || (pins & BIT(b)), I1);
        REQUIRE(STATE(m, b) != CACHED || (PUBLISHED(m, b) && !(pins & BIT(b))), I1);
        REQUIRE(STATE(m, b) != FREE || (!PUBLISHED(m, b) && !(pins & BIT(b))), I1);
        check_holders()
    }
    if
    :: epoch_of[m] == epoch && attached_term && (ruled[m] & BIT(attached_term)) -> check_published()
    :: else
    fi
}

inline check_holders() {
    count = 0; s2 = NONE;
    for (s1 : 0 .. LEASES * SEQS - 1) {
        for (i1 : 0 .. PLACES - 1) {
            if
            :: MANAGER(LEASE_OF(s1)) == m && holds[s1] == SEQUENCE && INDEX(i1) < table_length[s1] && table[AT(s1, i1)] == b ->
                count++;
                if
                :: s2 != NONE ->
                    REQUIRE(i1 == i2, I4);
                    x = MIN(MIN(length[s1], length[s2]), (INDEX(i1) + 1) * BLOCK_SIZE);
                    REQUIRE(KV(TENANT(LEASE_OF(s1)), PREFIX(code[s1], length[s1], x)) == KV(TENANT(LEASE_OF(s2)),
                        PREFIX(code[s2], length[s2], x)), I4)
                :: else
                fi;
                s2 = s1; i2 = i1
            :: else
            fi
        }
    }
    REQUIRE(count == REF(m, b), I2)
}

/* What a lookup returns was computed: it is there, slot by slot. */
inline check_published() {
    for (b : 1 .. BLOCKS) {
        for (i1 : 0 .. BLOCK_SIZE - 1) {
            if
            :: PUBLISHED(m, b) && FAULT != FAULT_SHARE_ACROSS_TENANTS ->
                REQUIRE(kv[b * BLOCK_SIZE + i1] == KV(PUBLISHED(m, b) / 32, (PUBLISHED(m,
                    b) % 32) >> (BLOCK_SIZE - 1 - i1)), I6)
            :: else
            fi
        }
    }
}

/* Seeded faults: the protocol without one of its rules. Each has to be caught; check.py says by what. */

#define FAULT_NO_RETIRED_STATE        1  /* what is released is free at once, whatever is in flight */
#define FAULT_NO_FENCE                2  /* the blocks of a lease that ends come back before the worker has answered */
#define FAULT_PUBLISH_AT_ALLOCATION   3  /* a block can be found before it is computed */
#define FAULT_EQUAL_TERM              4  /* two managers of one term */
#define FAULT_NO_EPOCH_CHECK          5  /* the worker takes grants of any epoch */
#define FAULT_SHARE_ACROSS_TENANTS    6  /* the tenant is not in the prefix hash */
#define FAULT_PINNED_TOO_SHORT        7  /* what is released waits for the first step in flight, not for the last */
#define FAULT_COPY_SOURCE_NOT_PINNED  8
#define FAULT_REPORT_OF_OLD_EPOCH     9  /* entered into the books of the new one */
#define FAULT_FAILED_IS_COMPUTED     10  /* the outcome of a step is not looked at */
#define FAULT_REPLAY_ACCEPTED        11  /* a step number below the next one is accepted */
#define FAULT_OUT_OF_ORDER           12  /* a step number above the next one is accepted */
#define FAULT_FENCE_ANSWERED_EARLY   13  /* while a step of the lease waits or runs */
#define FAULT_OLD_MANAGERS_GRANT     14  /* neither the signature nor whether this manager opened the lease is checked */
#define FAULT_REPORT_ENTERED_TWICE   15  /* the report's number is not looked at */
#define FAULT_ACKNOWLEDGED_UNAPPLIED 16  /* acknowledged when read, entered later */
#define FAULT_NO_PRIOR_STEP_FAILED   17  /* a step runs although one that it builds on computed nothing */
#define FAULT_REQUEST_APPLIED_AGAIN  18  /* a repeated request is planned again */
#define FAULT_WRITE_SHARED           19  /* no copy on write */
#define FAULT_FENCED_TOO_LATE        20  /* a lease's steps are accepted until its fence is answered */
#define FAULT_KNOWN_EPOCH_TRUSTED    21  /* an epoch that another manager ruled goes on under the first one's books */
#define FAULT_REPORTS_NOT_KEPT       22  /* a report that was sent is not sent again */
#define FAULT_LOWER_TERM             23  /* a superseded manager is obeyed */
#define FAULT_ORDER_AFTER_BREAK      24  /* orders of an earlier stream are obeyed */
#define FAULT_CHANGES_NOT_TOLD       25  /* the worker is not told of a table entry that became another block */
#define FAULT_TRIM_KEEPS_CLAIM       26  /* what a step in flight computes counts, though it was trimmed since */
#define FAULT_BOOKS_LOST             27  /* a manager without the books of an epoch with a history takes it */
#define FAULT_NEW_EPOCH_RUNS_FIRST   28  /* the worker forgets its rows while steps of the old epoch still wait */
#define FAULT_DOOMED_SHARED          29  /* blocks that a failed step was to fill are still shared */
#define FAULT_CLAIM_OF_RELEASED      30  /* a released sequence's step publishes what its fork writes on */
#define FAULT_CACHED_KEPT            31  /* cached blocks are not given up */
#define FAULT_REFERENCE_LEFT         32  /* a block that another one replaces keeps its reference */
#define FAULT_FOUND_STILL_EVICTABLE  33  /* a cached block that is found stays where evictions are taken from */
#define FAULT_FENCE_NOT_REPEATED     34  /* a fence order that a break lost is not given again on attach */
#define FAULT_ASKED_FOR_EVER         35  /* somebody tries again and again what changes nothing */
#define FAULT_OTHER_TERM_TRUSTED     36  /* books are gone on with though another term ruled the epoch since */
#define FAULT_TERMS_FORGOTTEN        37  /* a manager that comes back knows no term of its books but its own */
#define FAULT_ANSWERED_UNWRITTEN     38  /* answered before it is written; and what the worker did is not looked at */
#define FAULT_SETTLED_UNWRITTEN      39  /* a report acknowledged before it is written; likewise */
#define FAULT_STALE_STATE            40  /* an older copy of the state is gone on with; likewise */
#define FAULT_LATE_UNWRITTEN         41  /* looked at, but the grant that is not in the books comes after that */
#define FAULT_END_UNWRITTEN          42  /* looked at, but what was not written is the end of a lease */
#define FAULT_PLANNED_UNCHECKED      43  /* looked at, but after the next steps were planned */
#define FAULT_RAISED_EQUAL           44  /* two managers go above a term to the same one */
#define FAULT_OLDER_RAISES           45  /* a manager goes above the term of one that started after it */
#define FAULT_PASSED_BY_SCHEDULED    46  /* a window goes on with tokens that steps in flight compute, not with computed ones */
#define FAULT_PASS_NOT_TOLD          47  /* the worker's table keeps a block that was given up behind the window */
#define FAULT_WRITTEN_BEFORE_PASSED  48  /* a grant tells a changed entry and gives it up: the write is applied last */
#define FAULT_WINDOW_MISSED          49  /* a hit needs the blocks of full groups only */
#define FAULT_LOST_POSITION          50  /* a fork or trim to a position whose window is gone */
#define FAULT_GROUP_NOT_HASHED       51  /* blocks of two groups with the same tokens are one */
#define FAULT_WINDOW_NOT_MASKED      52  /* attention reads all positions before a run */
#define FAULT_DRAFT_KEPT             53  /* a rejected draft becomes a token of its sequence */
#define FAULT_DRAFT_COUNTED          54  /* a rejected draft counts as computed */
#define FAULT_DRAFT_BUILT_ON         55  /* a sequence is planned on as if its draft in flight were accepted */
#define FAULT_DRAFT_SHARED           56  /* a block that a draft fills is shared while its step is in flight */

#define FAULT_REFILLED_CARRIED       57  /* what steps in flight fill is carried over with the memory */
#define FAULT_NOT_WHOLE_CARRIED      58  /* blocks are carried over whatever the worker says of their bytes */
#define FAULT_OLDER_MEMORY           59  /* books are carried over to another memory, of an earlier epoch */
#define FAULT_OLDER_BOOKS            60  /* books of an earlier epoch are carried over to the memory */
#define FAULT_EMPTY_TAKEN_FOR_OLD    61  /* a holder that was started again gives its memory the old identity and header */
#define FAULT_TWO_WORKERS            62  /* a new worker has the memory while the old one still runs */

#define FAULT_WRITTEN_UNHELD         63  /* a host block is used for another copy while it is written to the disk */
#define FAULT_UNREPORTED_KEPT        64  /* a copy is found whose step was not reported before its lease ended */
#define FAULT_FAILED_READ_FOUND      65  /* a copy that could not be read from the disk is found in the host tier */
#define FAULT_READ_UNCHECKED         66  /* the hash in a file is not compared with that of the order */
#define FAULT_FOUND_TAKES_BLOCK      67  /* content that the worker has found is entered in a block that is in use */
#define FAULT_OLD_EPOCH_WRITES       68  /* an order of an epoch that is over reads a host block */
#define FAULT_OLD_EPOCH_READS        69  /* an order of an epoch that is over writes a host block */
#define FAULT_READ_BEFORE_BEGUN      70  /* a host block is written while steps of the epoch before still wait */
#define FAULT_RESET_KEEPS_COPIES     71
#define FAULT_RESET_KEEPS_FILES      72
#define FAULT_ERASE_OVERTAKES        73  /* the writes that were ordered before */
#define FAULT_ERASED_FOUND           74  /* content that is to be erased is entered when the worker tells of it */
#define FAULT_ERASE_NOT_CARRIED      75  /* what is to be erased is forgotten with the epoch */
#define FAULT_FAILED_ERASE_FORGOTTEN 76  /* the same when the disk fails it */
#define FAULT_HEADER_LEFT            77  /* a copy is overwritten under its header */

#define IS_STALE     (FAULT == FAULT_STALE_STATE)
#define IS_UNCHECKED (FAULT == FAULT_ANSWERED_UNWRITTEN || FAULT == FAULT_SETTLED_UNWRITTEN || \
    FAULT == FAULT_STALE_STATE)
#define COMES_LATE   (FAULT == FAULT_LATE_UNWRITTEN || FAULT == FAULT_ANSWERED_UNWRITTEN || IS_STALE)

/* Situations that the search has to get to: with -DCOVERAGE it says so when it does for the first time. */

#define REACH_FENCED_WHILE_RUNNING    1
#define REACH_LATE_GRANT              2
#define REACH_COPY                    3
#define REACH_EVICTION                4
#define REACH_WAITS_FOR_RETIRED       5
#define REACH_SHARED_ACROSS_LEASES    6
#define REACH_SHARED_UNFINISHED       7
#define REACH_PRIOR_STEP_FAILED       8
#define REACH_BLOCK_SWAPPED           9
#define REACH_REPORT_AGAIN           10
#define REACH_OLD_STREAM_HEARD       11
#define REACH_NEW_EPOCH_REQUIRED     12
#define REACH_TERM_SUPERSEDED        13
#define REACH_TWO_BOOKS_OF_AN_EPOCH  14
#define REACH_STEP_OF_OLD_EPOCH      15
#define REACH_RETIRED_ACQUIRED       16
#define REACH_LEASE_ADOPTED          17
#define REACH_SIGNATURE_REFUSED      18
#define REACH_THREE_STEPS            19  /* in flight */
#define REACH_CLAIM_FORGOTTEN        20
#define REACH_WARM_ATTACHED          21  /* under the books of before, by another term */
#define REACH_WARM_WITH_REPORTS      22  /* while reports are kept */
#define REACH_WARM_WHILE_RUNNING     23  /* while steps wait or run */
#define REACH_OTHER_TERM_RULED       24
#define REACH_BOOKS_BEHIND           25
#define REACH_TERM_RAISED            26
#define REACH_TERM_RAISED_TWICE      27  /* by a second manager, above the first one's */
#define REACH_PASSED                 28
#define REACH_PASSED_IN_FLIGHT       29  /* while steps of the lease are in flight */
#define REACH_WINDOW_HIT             30
#define REACH_WINDOW_GONE            31  /* the full group has the prefix, and the windowed one lacks what it sees */
#define REACH_POSITION_LOST          32
#define REACH_DRAFT_ACCEPTED         33
#define REACH_DRAFT_REJECTED         34
#define REACH_DRAFT_FAILED           35  /* its step, or one before it */
#define REACH_DRAFT_OF_RELEASED      36  /* accepted, after its sequence was released */
#define REACH_MEMORY_FITS            37  /* a new worker has the memory of the books */
#define REACH_MEMORY_OF_OTHER_BOOKS  38
#define REACH_CARRIED                39  /* a published block keeps its hash in a new epoch */
#define REACH_NOT_CARRIED            40  /* a published block is not whole */
#define REACH_KILLED_IN_STEP         41
#define REACH_HOST_EVICTION          42
#define REACH_DISK_EVICTION          43
#define REACH_LEFT_UNWRITTEN         44
#define REACH_ERASE_FAILED           45
#define REACH_RESET_ANSWERED         46
#define REACH_ERASED_NOT_ENTERED     47
#define REACH_CONTENT_FOUND          48
#define REACH_ORDER_REPORTED_AGAIN   49
#define REACH_ATTACHED_AGAIN         50
#define REACH_NEW_EPOCH_OF_WORKER    51
#define REACH_WRITE_OF_OLD_EPOCH     52
#define REACH_WRITTEN_IN_NEW_EPOCH   53
#define REACH_READ_FAILED            54
#define REACH_READ_OF_OLD_EPOCH      55
#define REACH_COPIED_BACK            56
#define REACH_KILLED_IN_WRITE        57
#define REACH_READ_ORDERED           58
#define REACH_CLOSED_UNREPORTED      59

/* Names that a violated assertion is shown with. They are false; with -DONLY=n all but the n-th are true, so that a
   fault is followed until that one is violated. */
#define IS_WAIVED(n) (ONLY != 0 && ONLY != (n))
hidden byte I1 = IS_WAIVED(1), I2 = IS_WAIVED(2), I3 = IS_WAIVED(3), I4 = IS_WAIVED(4);
hidden byte I5 = IS_WAIVED(5), I6 = IS_WAIVED(6), I7 = IS_WAIVED(7), I8 = IS_WAIVED(8);
hidden byte REPORTS = IS_WAIVED(9);    /* what is reported is what was planned, each once, in order, without holes */
hidden byte TERMS = IS_WAIVED(10);     /* one manager rules, and none comes back after a later one */
hidden byte PROGRESS = IS_WAIVED(11);  /* in the end: attached, every lease gone, every report acknowledged */
hidden byte WARM = IS_WAIVED(12);      /* books that are whole are gone on with */
hidden byte ERASED = IS_WAIVED(13);     /* when a reset is answered, nothing of its content is on the disk, nor later */
hidden byte BOUND = 0;                 /* a queue of the model is too short for its sizes: QUEUE */

#define REQUIRE(condition, name) assert((condition) || name)
#ifdef COVERAGE
c_decl { static char situation_reached[64]; }
#define MARK(situation) c_code { if (!situation_reached[situation]++) printf("reached %d\n", situation); }
#else
#define MARK(situation) skip
#endif

//! The files of a pool's books on disk: a snapshot, and the changes since.
//!
//!     log-0   log-1   ...     changes in the order in which they were made; the last file is appended to
//!     books-1 ...             the books before the first change of the log of the same number
//!
//! A log that is long enough is closed and the next begun. A thread then reads the last snapshot and the closed logs as
//! after a restart, writes the next snapshot, and removes the files that it replaces: the serving process never stops
//! for it.
//!
//! A record is its length, its CRC-32 and its content. A file that ends within a record, or differs from the written
//! bytes, is rejected. Written bytes survive the process but not the machine: the caller that opens a store must know
//! that the machine has not rebooted.
//!
//! Files are for their owner only. A link, a fifo or another kind of file is not opened.

use std::fs::{self, File, OpenOptions};
use std::io::{BufWriter, ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use crate::books::Books;
use crate::errors::Failure;
use crate::store::changes::Change;

/// Of the files. What another version has written is not read.
pub const VERSION: u32 = 24;

const LOG: &[u8; 12] = b"quire log   ";
const BOOKS: &[u8; 12] = b"quire books ";
const HEADER_BYTES: usize = 16;
const FRAME_BYTES: usize = 8;
const FIRST_BUFFER_BYTES: usize = 4096;
const FILE_MODE: u32 = 0o600;

/// The length limits of logs: they bound the changes to apply after a restart.
#[derive(Debug, Clone, Copy)]
pub struct LogLimits {
    pub num_bytes: usize,
    pub num_records: usize,
}

impl Default for LogLimits {
    fn default() -> LogLimits {
        LogLimits { num_bytes: 32 << 20, num_records: 20_000 }
    }
}

/// A value, or an error message.
type Outcome<T> = Result<T, String>;

/// The files of one epoch of a pool, open for its changes.
#[derive(Debug)]
pub struct Store {
    directory: PathBuf,
    limits: LogLimits,
    log: File,
    number: u64, // of the log that is open
    num_bytes: usize,
    num_records: usize,
    first_log: u64, // that no snapshot replaces yet
    snapshot: Option<JoinHandle<Outcome<()>>>,
    is_discarded: Arc<AtomicBool>,
    buffer: Vec<u8>,
}

impl Store {
    /// Begins a store with the first record, in an existing directory of its own.
    pub fn create(directory: &Path, first: &Change, limits: LogLimits) -> Outcome<Store> {
        let mut store = Store::open(directory, 0, 0, limits)?;
        store.append(first)?;
        Ok(store)
    }

    /// Begins a store with books as they are, in an existing directory of its own.
    pub fn continue_from(directory: &Path, books: &Books, limits: LogLimits) -> Outcome<Store> {
        let path = books_path(directory, 1);
        write_snapshot(&path, books).map_err(|error| of(&path, error))?;
        Store::open(directory, 1, 1, limits)
    }

    fn open(directory: &Path, first_log: u64, number: u64, limits: LogLimits) -> Outcome<Store> {
        Ok(Store {
            log: begin_log(directory, number)?,
            directory: directory.to_path_buf(),
            limits,
            number,
            num_bytes: 0,
            num_records: 0,
            first_log,
            snapshot: None,
            is_discarded: Arc::default(),
            buffer: vec![0; FIRST_BUFFER_BYTES],
        })
    }

    /// The books as they were when their process ended, and the store to go on with.
    pub fn recover(directory: &Path, limits: LogLimits) -> Outcome<(Books, Store)> {
        let first_log = last_snapshot(directory)?;
        let logs = logs_from(directory, first_log)?;
        let last = *logs.last().ok_or("there is no log")?;
        let (books, read) = read_books(directory, first_log, last)?;
        if let Some(violation) = books.violations().first() {
            return Err(format!("the books are wrong: {violation}"));
        }
        remove_before(directory, first_log)?;
        // A log of its own, so that no file is written by two processes.
        let mut store = Store::open(directory, first_log, last + 1, limits)?;
        (store.num_bytes, store.num_records) = (read.num_bytes, read.num_records); // it is replaced together with these
        Ok((books, store))
    }

    /// Writes a change down.
    pub fn append(&mut self, record: &Change) -> Outcome<()> {
        let num_bytes = self.frame(record)?;
        self.log.write_all(&self.buffer[..num_bytes]).map_err(told)?;
        self.num_bytes += num_bytes;
        self.num_records += 1;
        let is_long = self.num_bytes >= self.limits.num_bytes || self.num_records >= self.limits.num_records;
        if is_long { self.begin_next() } else { Ok(()) }
    }

    /// Puts a record into the buffer; returns its length.
    fn frame(&mut self, record: &Change) -> Outcome<usize> {
        loop {
            let (frame, content) = self.buffer.split_at_mut(FRAME_BYTES);
            match postcard::to_slice(record, content) {
                Ok(content) => {
                    frame[..4].copy_from_slice(&(content.len() as u32).to_le_bytes());
                    frame[4..].copy_from_slice(&crc32fast::hash(content).to_le_bytes());
                    return Ok(FRAME_BYTES + content.len());
                }
                Err(postcard::Error::SerializeBufferFull) => self.buffer.resize(2 * self.buffer.len(), 0),
                Err(error) => return Err(told(error)),
            }
        }
    }

    /// Closes the log and has a snapshot made of it, unless one is being made.
    fn begin_next(&mut self) -> Outcome<()> {
        if let Some(snapshot) = self.snapshot.take_if(|snapshot| snapshot.is_finished()) {
            self.end_snapshot(snapshot)?;
        }
        if self.snapshot.is_some() {
            return Ok(());
        }
        let (first, last) = (self.first_log, self.number);
        self.log = begin_log(&self.directory, last + 1)?;
        (self.number, self.num_bytes, self.num_records) = (last + 1, 0, 0);
        let (directory, is_discarded) = (self.directory.clone(), self.is_discarded.clone());
        let make = move || make_snapshot(&directory, first, last, &is_discarded);
        self.snapshot = Some(std::thread::Builder::new().name("quire-snapshot".into()).spawn(make).map_err(told)?);
        self.first_log = last + 1;
        Ok(())
    }

    fn end_snapshot(&mut self, snapshot: JoinHandle<Outcome<()>>) -> Outcome<()> {
        snapshot.join().unwrap_or_else(|_| Err("the snapshot's thread panicked".to_string()))
    }

    /// Waits for the snapshot that is being made, if one is.
    pub fn finish(&mut self) -> Outcome<()> {
        self.snapshot.take().map_or(Ok(()), |snapshot| self.end_snapshot(snapshot))
    }

    /// Removes everything: a restart must not continue from it.
    pub fn discard(mut self) -> Outcome<()> {
        self.is_discarded.store(true, Ordering::SeqCst);
        drop(self.finish()); // its result does not matter
        fs::remove_dir_all(&self.directory).map_err(told)
    }
}

// -- files ------------------------------------------------------------------------------------------------------------

fn log_path(directory: &Path, number: u64) -> PathBuf {
    directory.join(format!("log-{number}"))
}

fn books_path(directory: &Path, number: u64) -> PathBuf {
    directory.join(format!("books-{number}"))
}

fn header(kind: &[u8; 12]) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..12].copy_from_slice(kind);
    header[12..].copy_from_slice(&VERSION.to_le_bytes());
    header
}

fn begin_log(directory: &Path, number: u64) -> Outcome<File> {
    let path = log_path(directory, number);
    let mut log = create_file(&path).map_err(|error| of(&path, error))?;
    log.write_all(&header(LOG)).map_err(|error| of(&path, error))?;
    Ok(log)
}

/// A new file for its owner only; not one that is there already.
fn create_file(path: &Path) -> Outcome<File> {
    OpenOptions::new().append(true).create_new(true).mode(FILE_MODE).open(path).map_err(told)
}

/// Reads a regular file. Follows no link, and does not block on a fifo.
fn read_file(path: &Path) -> Outcome<Vec<u8>> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let mut file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(|error| of(path, error))?;
    if !file.metadata().map_err(|error| of(path, error))?.is_file() {
        return Err(of(path, "it is not a regular file"));
    }
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(|error| of(path, error))?;
    Ok(bytes)
}

/// The numbers of files of a kind, in order.
fn numbers(directory: &Path, prefix: &str) -> Outcome<Vec<u64>> {
    let mut numbers = Vec::new();
    for entry in fs::read_dir(directory).map_err(|error| of(directory, error))? {
        let name = entry.map_err(told)?.file_name();
        numbers.extend(name.to_str().and_then(|name| name.strip_prefix(prefix)?.parse::<u64>().ok()));
    }
    numbers.sort_unstable();
    Ok(numbers)
}

/// The number of the last snapshot; 0 if there is none.
fn last_snapshot(directory: &Path) -> Outcome<u64> {
    Ok(numbers(directory, "books-")?.last().copied().unwrap_or(0))
}

/// The logs from one on, without a hole.
fn logs_from(directory: &Path, first: u64) -> Outcome<Vec<u64>> {
    let logs: Vec<u64> = numbers(directory, "log-")?.into_iter().filter(|number| *number >= first).collect();
    match logs.iter().zip(first..).find(|(number, expected)| *number != expected) {
        Some((_, missing)) => Err(format!("log {missing} is missing")),
        None => Ok(logs),
    }
}

/// The books after the last change of these logs, and how long the logs are.
fn read_books(directory: &Path, first: u64, last: u64) -> Outcome<(Books, LogLimits)> {
    let mut read = LogLimits { num_bytes: 0, num_records: 0 };
    let mut books = if first > 0 { Some(read_snapshot(directory, first)?) } else { None };
    for number in first..=last {
        let path = log_path(directory, number);
        let bytes = read_file(&path)?;
        let replay = AssertUnwindSafe(|| replay(&mut books, &bytes));
        let replayed = catch_unwind(replay).unwrap_or_else(|_| Err("it can't be applied".to_string()));
        read.num_records += replayed.map_err(|error| of(&path, error))?;
        read.num_bytes += bytes.len();
    }
    Ok((books.ok_or("there are no books")?, read))
}

fn read_snapshot(directory: &Path, number: u64) -> Outcome<Books> {
    let path = books_path(directory, number);
    let bytes = read_file(&path)?;
    let content = bytes.strip_prefix(&header(BOOKS)).ok_or_else(|| of(&path, "it is of another version"))?;
    let whole = content.split_last_chunk::<4>().filter(|(books, crc)| crc32fast::hash(books).to_le_bytes() == **crc);
    let (books, _) = whole.ok_or_else(|| of(&path, "it is torn or damaged"))?;
    postcard::from_bytes(books).map_err(|error| of(&path, error))
}

/// Applies a log's changes, and returns how many there are; the first log of all begins the books.
fn replay(books: &mut Option<Books>, log: &[u8]) -> Outcome<usize> {
    let mut num_records = 0;
    let mut rest = log.strip_prefix(&header(LOG)).ok_or("it is of another version")?;
    while !rest.is_empty() {
        let (change, after) = next_record(rest).ok_or("it is torn or damaged")?;
        match books {
            Some(books) => change.apply(books).map_err(|failure| match failure {
                Failure::Refused(refusal) => refusal.message,
                Failure::Broken(what) => what,
            })?,
            None => *books = Some(change.begin().ok_or("it does not begin with new books")?),
        }
        (rest, num_records) = (after, num_records + 1);
    }
    Ok(num_records)
}

fn next_record(bytes: &[u8]) -> Option<(Change<'static>, &[u8])> {
    let (length, rest) = bytes.split_first_chunk::<4>()?;
    let (crc, rest) = rest.split_first_chunk::<4>()?;
    let (content, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
    if crc32fast::hash(content).to_le_bytes() != *crc {
        return None;
    }
    Some((postcard::from_bytes(content).ok()?, rest))
}

/// Writes the books after these logs, and removes the files that this replaces.
fn make_snapshot(directory: &Path, first: u64, last: u64, is_discarded: &AtomicBool) -> Outcome<()> {
    let (books, _) = read_books(directory, first, last)?;
    let unfinished = directory.join("books.unfinished");
    write_snapshot(&unfinished, &books).map_err(|error| of(&unfinished, error))?;
    if is_discarded.load(Ordering::SeqCst) {
        return Ok(());
    }
    let path = books_path(directory, last + 1);
    fs::rename(&unfinished, &path).map_err(|error| of(&path, error))?;
    remove_before(directory, last + 1)
}

/// Writes the books to a new file, in place of one that was left there unfinished.
pub(crate) fn write_snapshot(path: &Path, books: &Books) -> Outcome<()> {
    remove_if_there(path)?;
    let mut file = BufWriter::with_capacity(1 << 20, Summed { file: create_file(path)?, sum: Default::default() });
    file.write_all(&header(BOOKS)).map_err(told)?;
    file.flush().map_err(told)?;
    file.get_mut().sum = Default::default(); // it covers the books
    let mut file = postcard::to_io(books, file).map_err(told)?;
    file.flush().map_err(told)?;
    let Summed { mut file, sum } = file.into_inner().map_err(told)?;
    file.write_all(&sum.finalize().to_le_bytes()).map_err(told)
}

/// A file, and the CRC-32 of the bytes written to it.
struct Summed {
    file: File,
    sum: crc32fast::Hasher,
}

impl Write for Summed {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let num_written = self.file.write(bytes)?;
        self.sum.update(&bytes[..num_written]);
        Ok(num_written)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.file.flush()
    }
}

fn remove_if_there(path: &Path) -> Outcome<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(told(error)),
        _ => Ok(()),
    }
}

/// Removes logs and snapshots that a snapshot of this number replaces.
fn remove_before(directory: &Path, number: u64) -> Outcome<()> {
    for old in numbers(directory, "books-")?.into_iter().filter(|old| *old < number) {
        fs::remove_file(books_path(directory, old)).map_err(told)?;
    }
    for old in numbers(directory, "log-")?.into_iter().filter(|old| *old < number) {
        fs::remove_file(log_path(directory, old)).map_err(told)?;
    }
    Ok(())
}

fn told(error: impl ToString) -> String {
    error.to_string()
}

fn of(path: &Path, error: impl ToString) -> String {
    format!("{}: {}", path.display(), error.to_string())
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;
    use std::collections::BTreeMap;
    use std::os::unix::fs::PermissionsExt;

    use sha2::{Digest, Sha256};

    use super::*;
    use crate::books::lease::answers::RequestKey;
    use crate::books::pins::PinId;
    use crate::books::plans::{Extend, StepRequest};
    use crate::books::settle::{StepOutcome, StepReport};
    use crate::books::tests::{admission, draft, geometry, report, some_report, some_request, some_share};
    use crate::cache::accounts::Share;
    use crate::cache::eviction::policies::POLICIES;
    use crate::cache::pool::tests::Random;
    use crate::cache::prefix::Namespace;
    use crate::store::stored_books::StoredBooks;

    const LIMITS: LogLimits = LogLimits { num_bytes: 1 << 20, num_records: 9 };
    /// The nine records of `planned` close one log. A second one would be closed only if the first snapshot is ready.
    const ONE_SNAPSHOT: LogLimits = LogLimits { num_records: 5, ..LIMITS };
    const LEASES: [(&str, &[u8]); 3] = [("a", b"x"), ("b", b"x"), ("c", b"y")];

    fn key<'a>(request_id: &'a str, digest: &'a [u8]) -> RequestKey<'a> {
        RequestKey { request_id, digest }
    }

    /// A directory that is removed with it.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let path = std::env::temp_dir().join(format!("quire-store-{}-{name}", std::process::id()));
            drop(fs::remove_dir_all(&path));
            fs::create_dir_all(&path).unwrap();
            Folder(path)
        }

        fn files(&self) -> Vec<String> {
            let names = fs::read_dir(&self.0).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
            let mut names: Vec<String> = names.collect();
            names.sort();
            names
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            drop(fs::remove_dir_all(&self.0));
        }
    }

    fn begin(policy: &str) -> Change<'static> {
        Change::Begin { geometry: Cow::Owned(geometry(12)), policy: policy.to_string().into(), now: 0.0 }
    }

    fn create(folder: &Folder, policy: &str, limits: LogLimits) -> StoredBooks {
        let first = begin(policy);
        let store = Store::create(&folder.0, &first, limits).unwrap();
        StoredBooks::new("pool", 0, first.begin().unwrap(), Some(store))
    }

    fn recover(folder: &Folder, limits: LogLimits) -> StoredBooks {
        let (books, store) = Store::recover(&folder.0, limits).unwrap();
        StoredBooks::new("pool", 0, books, Some(store))
    }

    fn open_leases(stored: &mut StoredBooks) {
        for (lease_id, tenant) in LEASES {
            stored.make(&Change::OpenLease { lease_id: lease_id.into(), tenant: tenant.into(), ttl: 30.0 }).unwrap();
        }
    }

    /// Applies a random change to books; returns the answer as text.
    fn do_something(stored: &mut StoredBooks, random: &mut Random, now: f64, number: u64) -> String {
        let (lease_id, tenant) = LEASES[random.below(3)];
        let num_in_flight = stored.books().leases[lease_id].in_flight.len();
        match random.below(24) {
            0 => {
                let shares = [(b"x".to_vec(), some_share(random)), (b"y".to_vec(), some_share(random))];
                let by_name: BTreeMap<_, _> = shares.into_iter().skip(random.below(3)).collect();
                let default = Share::everything(12);
                format!("{:?}", stored.make(&Change::SetShares { default, by_name: Cow::Owned(by_name) }))
            }
            1 => {
                let (tokens, until) = (random.tokens(6, 2), now + random.below(4) as f64);
                format!("{:?}", stored.pin_prefix(tenant, &tokens, &b"".into(), until))
            }
            2 => {
                let id = stored.books().pins().all().next().map(|pin| pin.id).unwrap_or_default();
                format!("{:?}", stored.unpin_prefix(None, &id))
            }
            3 if random.below(2) == 0 => {
                format!("{:?}", stored.reset_prefix_cache(0, random.below(13) as u32, now, tenant))
            }
            3 => {
                let namespace = [None, Some(Namespace::default())][random.below(2)].clone();
                let mut reset = stored.begin_reset(tenant, namespace.as_ref(), &random.tokens(2, 2)).unwrap();
                format!("{:?}", [(); 3].map(|()| stored.go_on_with_reset(&mut reset, now, tenant)))
            }
            4 => format!("{:?}", stored.make(&Change::Advance { now })),
            5 => {
                let asked = stored.check_admission(&[b'a' + random.below(9) as u8], &admission(1, &[1, 0, 1]), 0);
                format!("{asked:?}")
            }
            6 => {
                stored.make(&Change::EndLease { lease_id: lease_id.into() }).unwrap();
                stored.make(&Change::CloseLease { lease_id: lease_id.into() }).unwrap();
                let open = Change::OpenLease { lease_id: lease_id.into(), tenant: tenant.into(), ttl: 30.0 };
                format!("{:?}", stored.make(&open))
            }
            _ if num_in_flight < 3 && random.below(2) == 0 => {
                let request_id = if random.below(2) == 0 { number.to_string() } else { String::new() };
                format!("{:?}", stored.plan(lease_id, 0, &some_request(random), now, &key(&request_id, b"digest")))
            }
            _ if num_in_flight > 0 => {
                let mut report = some_report(stored.books(), lease_id, random);
                if stored.books().leases[lease_id].in_flight[0].is_doomed || random.below(8) == 0 {
                    report.outcome = [StepOutcome::Failed, StepOutcome::Skipped][random.below(2)];
                }
                format!("{:?}", stored.settle(lease_id, &StepReport { report_number: number, ..report }))
            }
            _ => String::new(),
        }
    }

    fn state(stored: &StoredBooks) -> String {
        let (books, leases) = (stored.books(), |lease| &stored.books().leases[lease]);
        let leases = LEASES.map(|(lease, _)| (leases(lease).next_step, leases(lease).is_ending, leases(lease).ttl));
        let tenants: Vec<_> = (0..books.tenants().len() as u32).map(|id| books.tenants().name(id)).collect();
        let counters = (books.counters(), books.pool().counters(), books.pool().accounts());
        let keeps = books.pool().parking().keeps();
        let kept = |block| keeps.map(|keeps| (keeps.until(block), keeps.ttl(block)));
        let kept: Vec<_> = (0..books.geometry().num_blocks as u32).map(kept).collect();
        let uses = |tenant| keeps.map(|keeps| keeps.of_tenant(tenant).collect::<Vec<_>>());
        let uses: Vec<_> = (0..books.tenants().len() as u32).map(uses).collect();
        let kept = format!("{kept:?} {uses:?}");
        format!("{} {leases:?} {tenants:?} {counters:?} {kept} {}", books.state(None), stored.books().last_report())
    }

    #[test]
    fn whatever_was_changed_is_there_again_and_goes_on_alike() {
        for (seed, policy) in (0..12).flat_map(|seed| POLICIES.map(|policy| (seed, policy))) {
            let folder = Folder::new(&format!("alike-{seed}-{policy}"));
            let mut stored = create(&folder, policy, LIMITS);
            let mut kept = StoredBooks::new("pool", 0, begin(policy).begin().unwrap(), None);
            open_leases(&mut stored);
            open_leases(&mut kept);
            let (mut one, mut other, mut restarts) = (Random(seed), Random(seed), Random(seed + 100));
            for number in 1..300 {
                let now = number as f64 / 2.0;
                let answers = (
                    do_something(&mut stored, &mut one, now, number),
                    do_something(&mut kept, &mut other, now, number),
                );
                assert_eq!(answers.0, answers.1, "seed {seed}, {policy}, call {number}");
                if restarts.below(20) == 0 {
                    stored.finish().unwrap();
                    drop(stored);
                    stored = recover(&folder, LIMITS);
                    assert_eq!(state(&stored), state(&kept), "seed {seed}, {policy}, call {number}");
                }
            }
            stored.finish().unwrap();
            assert!(folder.files().iter().any(|name| name.starts_with("books-")), "{:?}", folder.files());
            assert!(folder.files().len() < 12, "what is replaced is removed: {:?}", folder.files());
        }
    }

    #[test]
    fn a_new_epoch_on_kept_memory_is_there_again() {
        for policy in POLICIES {
            let folders = ["before", "after"].map(|name| Folder::new(&format!("kept-memory-{policy}-{name}")));
            let mut stored = create(&folders[0], policy, LIMITS);
            open_leases(&mut stored);
            let mut random = Random(5);
            (1..60).for_each(|number| drop(do_something(&mut stored, &mut random, number as f64, number)));
            let carried = stored.begin_epoch(3, &[0xff, 0x5f], 60.0, Some(&folders[1].0)).unwrap();
            assert!(carried.num_kept > 0 && stored.epoch() == 3 && stored.take_loss().is_none(), "{carried:?}");
            let again = recover(&folders[1], LIMITS);
            assert_eq!(state(&again), state(&stored));
            let plan = |stored: &mut StoredBooks| {
                format!("{:?}", stored.plan("a", stored.epoch(), &some_request(&mut Random(8)), 61.0, &key("", b"")))
            };
            drop(again);
            assert!(plan(&mut stored).contains("step_number: 1"));
            assert_eq!(
                state(&recover(&folders[1], LIMITS)),
                state(&stored),
                "the changes of the new epoch are written"
            );
        }
    }

    /// Two plans with request ids, one of which is settled; and their answers.
    fn planned(stored: &mut StoredBooks) -> Vec<String> {
        open_leases(stored);
        let mut answers = Vec::new();
        for (number, request_id) in ["one", "two"].into_iter().enumerate() {
            stored.plan("a", 0, &StepRequest::default(), 1.0, &key("", b"d")).unwrap();
            let admissions = vec![admission(number as i64, &[1, 2, 3, 4, number as i32])];
            let request = StepRequest { admissions, ..StepRequest::default() };
            answers.push(format!("{:?}", stored.plan("a", 0, &request, 1.0, &key(request_id, b"d")).unwrap().unwrap()));
        }
        stored.settle("a", &StepReport { report_number: 7, ..report(stored.books(), "a") }).unwrap();
        answers
    }

    /// Books with a pin until 5.0, and its id.
    fn pinned(folder: &Folder) -> (StoredBooks, PinId) {
        let mut stored = create(folder, "lru", LogLimits::default());
        open_leases(&mut stored);
        let tokens = [1, 2, 3, 4, 0];
        let request = StepRequest { admissions: vec![admission(1, &tokens)], ..StepRequest::default() };
        stored.plan("a", 0, &request, 1.0, &key("", b"")).unwrap();
        stored.settle("a", &StepReport { report_number: 1, ..report(stored.books(), "a") }).unwrap();
        let pin = stored.pin_prefix(b"x", &tokens, &b"".into(), 5.0).unwrap().unwrap();
        (stored, pin.id)
    }

    #[test]
    fn a_pin_that_was_taken_back_does_not_come_back() {
        let folder = Folder::new("taken-back");
        let (mut stored, pin_id) = pinned(&folder);
        assert!(stored.unpin_prefix(None, &pin_id).unwrap());
        drop(stored);
        assert_eq!(recover(&folder, LIMITS).books().pins().all().count(), 0);
    }

    #[test]
    fn a_pin_that_a_refused_plan_ended_does_not_come_back() {
        let folder = Folder::new("refused");
        let (mut stored, _) = pinned(&folder);
        let extend = || Extend { seq_id: 1, num_tokens: 1, append: vec![], ..Extend::default() };
        let twice = StepRequest { extends: vec![extend(), extend()], ..StepRequest::default() };
        assert!(matches!(stored.plan("a", 0, &twice, 6.0, &key("", b"")), Err(Failure::Refused(_))));
        assert_eq!(stored.books().pins().all().count(), 0);
        drop(stored);
        assert_eq!(recover(&folder, LIMITS).books().pins().all().count(), 0);
    }

    #[test]
    fn answers_are_remembered_through_a_log_and_through_a_snapshot() {
        for limits in [LogLimits::default(), LogLimits { num_records: 1, ..LIMITS }] {
            let folder = Folder::new(&format!("answers-{}", limits.num_records));
            let mut stored = create(&folder, "lineage", limits);
            let answers = planned(&mut stored);
            stored.finish().unwrap();
            drop(stored);
            let stored = recover(&folder, limits);
            let recall =
                |request_id, digest: &[u8]| stored.books().lease("a").unwrap().answers.recall(&key(request_id, digest));
            for (request_id, answer) in ["one", "two"].into_iter().zip(&answers) {
                assert_eq!(&format!("{:?}", recall(request_id, b"d").unwrap().unwrap()), answer);
            }
            assert!(recall("three", b"d").unwrap().is_none());
            assert!(recall("", b"d").unwrap().is_none());
            assert!(format!("{:?}", recall("one", b"e")).contains("RequestIdReused"));
            assert_eq!(stored.books().last_report(), 7);
        }
    }

    #[test]
    fn drafts_in_flight_are_settled_after_a_restart() {
        for limits in [LogLimits::default(), LogLimits { num_records: 1, ..LIMITS }] {
            for num_restarts in 0..3 {
                let folder = Folder::new(&format!("drafts-{}-{num_restarts}", limits.num_records));
                let mut stored = create(&folder, "lineage", limits);
                open_leases(&mut stored);
                let admitted = StepRequest { admissions: vec![admission(1, &[1, 2, 3])], ..StepRequest::default() };
                let drafted = StepRequest { extends: vec![draft(1, &[9, 9, 8])], ..StepRequest::default() };
                stored.plan("a", 0, &admitted, 1.0, &key("", b"")).unwrap();
                stored.plan("a", 0, &drafted, 1.0, &key("", b"")).unwrap();
                for number in 1..=2 {
                    if number <= num_restarts {
                        stored.finish().unwrap();
                        drop(stored);
                        stored = recover(&folder, limits);
                    }
                    let extend = StepRequest { extends: vec![draft(1, &[9])], ..StepRequest::default() };
                    let refused = &stored.plan("a", 0, &extend, 2.0, &key("", b"")).unwrap().unwrap().refusals[0];
                    assert_eq!(refused.refusal.message, "drafts of sequence 1 are in flight");
                    let report = report(stored.books(), "a");
                    stored.settle("a", &StepReport { report_number: number, ..report }).unwrap();
                }
                stored.finish().unwrap();
                drop(stored);
                let stored = recover(&folder, limits);
                let sequence = stored.books().sequence(stored.books().lease("a").unwrap().row_of(1).unwrap());
                assert_eq!(sequence.tokens, [1, 2, 3, 9, 9, 9, 9]);
                assert_eq!((sequence.num_computed, sequence.num_drafts), (6, 0));
                let counters = stored.books().counters();
                assert_eq!((counters.drafted_tokens, counters.accepted_drafts), (3, 2));
                assert_eq!(stored.books().violations(), [""; 0]);
            }
        }
    }

    #[test]
    fn what_is_torn_or_damaged_is_not_read() {
        let folder = Folder::new("damaged");
        planned(&mut create(&folder, "lineage", LogLimits::default()));
        let path = log_path(&folder.0, 0);
        let whole = fs::read(&path).unwrap();
        let mut num_read = 0;
        for length in 0..whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            num_read += usize::from(read_books(&folder.0, 0, 0).is_ok());
        }
        assert_eq!(num_read, 8, "between two records only: the books' beginning, three leases, four plans");
        for place in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[place] ^= 1 << (place % 8);
            fs::write(&path, &damaged).unwrap();
            assert!(read_books(&folder.0, 0, 0).is_err(), "byte {place}");
        }
    }

    #[test]
    fn a_damaged_snapshot_is_not_read() {
        let folder = Folder::new("damaged-snapshot");
        let mut stored = create(&folder, "lru", ONE_SNAPSHOT);
        planned(&mut stored);
        stored.finish().unwrap();
        assert_eq!(folder.files(), ["books-1", "log-1"]);
        let path = books_path(&folder.0, 1);
        let whole = fs::read(&path).unwrap();
        for place in (0..whole.len()).step_by(101).chain(whole.len() - 5..whole.len()) {
            let mut damaged = whole.clone();
            damaged[place] ^= 0x10;
            fs::write(&path, &damaged).unwrap();
            assert!(read_books(&folder.0, 1, 1).is_err(), "byte {place}");
        }
        fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        assert!(read_books(&folder.0, 1, 1).is_err());
    }

    #[test]
    fn what_is_not_a_regular_file_is_not_read() {
        let folder = Folder::new("irregular");
        let mut stored = create(&folder, "lru", ONE_SNAPSHOT);
        planned(&mut stored);
        stored.finish().unwrap();
        drop(stored);
        for name in ["books-1", "log-1"] {
            let (path, kept) = (folder.0.join(name), folder.0.join("kept"));
            fs::rename(&path, &kept).unwrap();
            std::os::unix::fs::symlink(&kept, &path).unwrap();
            assert!(read_books(&folder.0, 1, 1).is_err(), "{name} is a link to the file");
            fs::remove_file(&path).unwrap();
            assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
            let told = read_books(&folder.0, 1, 1).unwrap_err();
            assert!(told.ends_with(&format!("{name}: it is not a regular file")), "{told}");
            fs::remove_file(&path).unwrap();
            fs::create_dir(&path).unwrap();
            assert!(read_books(&folder.0, 1, 1).is_err(), "{name} is a directory");
            fs::remove_dir(&path).unwrap();
            fs::rename(&kept, &path).unwrap();
            assert!(read_books(&folder.0, 1, 1).is_ok());
        }
    }

    #[test]
    fn a_link_in_place_of_a_file_to_write_is_not_followed() {
        let folder = Folder::new("links");
        let target = folder.0.join("target");
        fs::write(&target, b"not ours").unwrap();
        std::os::unix::fs::symlink(&target, folder.0.join("books.unfinished")).unwrap();
        let mut stored = create(&folder, "lru", ONE_SNAPSHOT);
        planned(&mut stored);
        stored.finish().unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"not ours");
        assert_eq!(folder.files(), ["books-1", "log-1", "target"]);
        drop(stored);
        std::os::unix::fs::symlink(&target, log_path(&folder.0, 2)).unwrap();
        assert!(Store::open(&folder.0, 1, 2, LIMITS).unwrap_err().contains("exists"));
        assert_eq!(fs::read(&target).unwrap(), b"not ours");
    }

    #[test]
    fn files_are_for_their_owner_only() {
        let folder = Folder::new("modes");
        let mut stored = create(&folder, "lru", ONE_SNAPSHOT);
        planned(&mut stored);
        stored.finish().unwrap();
        for name in ["books-1", "log-1"] {
            let mode = fs::metadata(folder.0.join(name)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, FILE_MODE, "{name}");
        }
    }

    #[test]
    fn a_missing_log_is_told_and_a_snapshot_that_was_not_finished_is_none() {
        let folder = Folder::new("missing");
        let mut stored = create(&folder, "lru", ONE_SNAPSHOT);
        planned(&mut stored);
        stored.finish().unwrap();
        fs::write(folder.0.join("books.unfinished"), b"quire").unwrap();
        let before = state(&stored);
        drop(stored);
        assert_eq!(state(&recover(&folder, LIMITS)), before);
        assert_eq!(folder.files(), ["books-1", "books.unfinished", "log-1", "log-2"]);
        fs::remove_file(log_path(&folder.0, 1)).unwrap();
        assert_eq!(Store::recover(&folder.0, LIMITS).unwrap_err(), "log 1 is missing");
        fs::remove_file(log_path(&folder.0, 2)).unwrap();
        assert_eq!(Store::recover(&folder.0, LIMITS).unwrap_err(), "there is no log");
    }

    #[test]
    fn a_plan_that_comes_out_otherwise_is_told() {
        let folder = Folder::new("otherwise");
        let first = begin("lru");
        let mut store = Store::create(&folder.0, &first, LIMITS).unwrap();
        let request = StepRequest { admissions: vec![admission(1, &[1, 2, 3])], ..StepRequest::default() };
        store.append(&Change::OpenLease { lease_id: "a".into(), tenant: b"".into(), ttl: 1.0 }).unwrap();
        let plan = Change::Plan {
            lease_id: "a".into(),
            request: Cow::Owned(request),
            now: 0.0,
            request_id: "".into(),
            digest: b"".into(),
            checksum: 1,
        };
        store.append(&plan).unwrap();
        let told = Store::recover(&folder.0, LIMITS).unwrap_err();
        assert!(told.contains("a plan of lease a is another one"), "{told}");
    }

    #[test]
    fn a_store_that_fails_is_given_up_and_the_books_go_on() {
        let folder = Folder::new("full");
        let first = begin("lru");
        let mut store = Store::create(&folder.0, &first, LIMITS).unwrap();
        store.log = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let mut stored = StoredBooks::new("pool", 0, first.begin().unwrap(), Some(store));
        planned(&mut stored);
        assert!(!stored.is_stored() && !folder.0.exists());
        let loss = stored.take_loss().unwrap();
        assert!(loss.contains("No space left"), "{loss}");
        assert_eq!((stored.take_loss(), stored.books().last_report()), (None, 7));
    }

    #[test]
    fn a_store_that_fails_and_cant_be_removed_stops_everything() {
        let folder = Folder::new("stuck");
        let first = begin("lru");
        let mut store = Store::create(&folder.0, &first, LIMITS).unwrap();
        store.log = OpenOptions::new().write(true).open("/dev/full").unwrap();
        fs::remove_dir_all(&folder.0).unwrap();
        let mut stored = StoredBooks::new("pool", 0, first.begin().unwrap(), Some(store));
        let told = format!("{:?}", stored.make(&Change::Advance { now: 1.0 }));
        assert!(told.contains("can't be removed"), "{told}");
    }

    /// A change of the written format needs a new version: an old store must not be read as a new one.
    #[test]
    fn the_layout_is_that_of_this_version() {
        let folder = Folder::new("layout");
        let mut sums = Vec::new();
        for policy in POLICIES {
            let mut stored = StoredBooks::new("pool", 0, begin(policy).begin().unwrap(), None);
            let open = Change::OpenLease { lease_id: "a".into(), tenant: b"x".into(), ttl: 30.0 };
            stored.make(&open).unwrap();
            let request = StepRequest { admissions: vec![admission(1, &[1, 2, 3])], ..StepRequest::default() };
            stored.plan("a", 0, &request, 1.0, &key("one", b"d")).unwrap();
            stored.settle("a", &StepReport { report_number: 1, ..report(stored.books(), "a") }).unwrap();
            stored.pin_prefix(b"x", &[1, 2, 3], &b"".into(), 9.0).unwrap().unwrap();
            stored.plan("a", 0, &request, 1.0, &key("", b"")).unwrap();
            stored.settle("a", &StepReport { report_number: 2, ..report(stored.books(), "a") }).unwrap();
            let drafted = StepRequest { extends: vec![draft(1, &[9, 8])], ..StepRequest::default() };
            stored.plan("a", 0, &drafted, 1.0, &key("two", b"d")).unwrap();
            let path = folder.0.join(policy);
            stored.write_snapshot(&path).unwrap();
            // A CRC of what ends with its own CRC tells lengths apart, and nothing else.
            sums.push(Sha256::digest(fs::read(&path).unwrap())[..4].to_vec());
        }
        assert_eq!((VERSION, sums), (24, vec![vec![33, 183, 88, 212], vec![174, 94, 195, 41]]));
    }
}

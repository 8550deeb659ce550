//! Requests and reports as the books take them. Decoding checks form (lengths, ranges); the books check meaning.

use prost::{DecodeError, Message};
use prost_types::Duration;
use sha2::{Digest, Sha256};

use crate::books::disk_reports::FoundCopy;
use crate::books::plans::{
    Admission, Breakpoint, CacheUse, ExpectedPrompt, Extend, Fork, HostCopyUse, Restore, Retention, ReturnHint,
    StepRequest, Trim,
};
use crate::books::settle::{StepOutcome, StepReport};
use crate::cache::groups::Group;
use crate::cache::prefix::Namespace;
use crate::errors::Result;
use crate::wire::bounds::{
    ADAPTER_BYTES, LEAST_KEEP_S, MAX_BREAKPOINTS, MAX_EXPECTED_S, MAX_FORKED_TOKENS, MAX_FOUND_COPIES, MAX_KEEP_S,
    MAX_PLAN_ITEMS, MAX_PLAN_TOKENS, MAX_RANGES, MAX_REQUEST_ID_BYTES, MAX_RETENTION_S, MAX_SALT_BYTES,
    MAX_TENANT_LENGTH, check_bytes, check_count, check_length, check_parallel, level, not_negative, refused,
    shown_seconds,
};
use crate::wire::messages::{self, PlanStepRequest, return_hint::Hint};

/// A PlanStepsRequest with its plan as bytes: on the wire, a message within a message looks like bytes.
#[derive(Clone, PartialEq, Message)]
struct PlanOnStream {
    #[prost(bytes = "vec", repeated, tag = "1")]
    parts: Vec<Vec<u8>>,
}

/// The bytes of the PlanStepRequest in a PlanStepsRequest. A message that was sent in parts is their concatenation.
pub fn plan_on_stream(body: &[u8]) -> std::result::Result<Vec<u8>, DecodeError> {
    Ok(PlanOnStream::decode(body)?.parts.concat())
}

/// The fingerprint of a request with a request id; empty if it has no id. `body` is the message's bytes.
pub fn digest_of(request: &PlanStepRequest, body: &[u8]) -> Vec<u8> {
    if request.request_id.is_empty() { Vec::new() } else { Sha256::digest(body).to_vec() }
}

/// The items of a plan, within a pool's limits of sequences, of tokens of each, and of drafts of each. Refused
/// (INVALID_ARGUMENT) for lists that do not fit together and values out of range.
///
/// Moves the lists of tokens and ids out of the message. `names_tenants`: the caller may name the tenant of an
/// admission.
pub fn step_request(
    request: &mut PlanStepRequest,
    max_sequences: usize,
    max_tokens: usize,
    max_drafts: usize,
    names_tenants: bool,
) -> Result<StepRequest> {
    check_bytes("request_id", request.request_id.len(), MAX_REQUEST_ID_BYTES)?;
    let extends = request.extends.take().unwrap_or_default();
    check_plan_size(request, &extends, max_sequences.min(MAX_PLAN_ITEMS), max_tokens)?;
    let (trimmed, trim_counts) = (&request.trim_sequence_ids, &request.trim_token_counts);
    check_parallel("trim_token_counts", trim_counts.len(), "trim_sequence_ids", trimmed.len())?;
    let admission_token_budget = not_negative("admission_token_budget", request.admission_token_budget)?;
    let admission_reserve = not_negative("admission_reserve_block_count", request.admission_reserve_block_count)?;
    let trim = |(seq_id, num_tokens): (&i32, &i32)| Trim { seq_id: (*seq_id).into(), num_tokens: (*num_tokens).into() };
    Ok(StepRequest {
        releases: wide(&request.release_sequence_ids),
        return_hints: request.return_hints.iter().map(return_hint).collect::<Result<_>>()?,
        offloads: wide(&request.offload_sequence_ids),
        expected_prompts: std::mem::take(&mut request.expected_prompts)
            .into_iter()
            .map(|each| expected_prompt(each, max_tokens))
            .collect::<Result<_>>()?,
        trims: trimmed.iter().zip(trim_counts).map(trim).collect(),
        forks: request.forks.iter().map(fork).collect::<Result<_>>()?,
        extends: extend_all(&extends, max_drafts)?,
        restores: request.restores.iter().map(restore).collect::<Result<_>>()?,
        admissions: std::mem::take(&mut request.admissions)
            .into_iter()
            .map(|each| admission(each, max_tokens, "admissions"))
            .collect::<Result<_>>()?,
        admission_token_budget,
        admission_reserve,
        host_copy_use: host_copy_use(request.host_copy_use)?,
        skips_disk: request.skips_disk,
        names_tenants,
        hashes: Vec::new(),
    })
}

/// At most so many items of a kind, and so many tokens or as many as one sequence can have.
fn check_plan_size(
    request: &PlanStepRequest,
    extends: &messages::Extends,
    most: usize,
    max_tokens: usize,
) -> Result<()> {
    let sizes = [
        ("release_sequence_ids", request.release_sequence_ids.len()),
        ("return_hints", request.return_hints.len()),
        ("offload_sequence_ids", request.offload_sequence_ids.len()),
        ("expected_prompts", request.expected_prompts.len()),
        ("trim_sequence_ids", request.trim_sequence_ids.len()),
        ("forks", request.forks.len()),
        ("extends.sequence_ids", extends.sequence_ids.len()),
        ("extends.token_counts", extends.token_counts.len()),
        ("restores", request.restores.len()),
        ("admissions", request.admissions.len()),
        ("forks.child_sequence_ids", request.forks.iter().map(|fork| fork.child_sequence_ids.len()).sum()),
    ];
    sizes.into_iter().try_for_each(|(field, size)| check_count(field, size, most))?;
    let forked = |fork: &messages::Fork| fork.child_sequence_ids.len() * usize::try_from(fork.token_count).unwrap_or(0);
    let num_forked: usize = request.forks.iter().map(forked).sum();
    let most_forked = max_tokens.max(MAX_FORKED_TOKENS);
    if num_forked > most_forked {
        let limit = format!("at most {most_forked} of all children");
        return refused("forks.token_count", format!("{num_forked} tokens"), limit);
    }
    let most_tokens = max_tokens.max(MAX_PLAN_TOKENS);
    check_count("extends.append_token_ids", extends.append_token_ids.len(), most_tokens)?;
    let num_admitted = request.admissions.iter().map(|admission| admission.token_ids.len()).sum();
    check_count("admissions.token_ids", num_admitted, most_tokens)?;
    let num_expected = request.expected_prompts.iter().map(|prompt| prompt.token_ids.len()).sum();
    check_count("expected_prompts.token_ids", num_expected, most_tokens - num_admitted)
}

fn wide(ids: &[i32]) -> Vec<i64> {
    ids.iter().copied().map(i64::from).collect()
}

fn return_hint(hint: &messages::ReturnHint) -> Result<ReturnHint> {
    let expected_in = match &hint.hint {
        Some(Hint::ExpectedIn(duration)) => Some(expected_seconds("return_hints.expected_in", Some(duration))?),
        Some(Hint::NotExpected(true)) => None,
        _ => return refused("return_hints.hint", "not set", "expected_in, or not_expected: true"),
    };
    Ok(ReturnHint { seq_id: hint.sequence_id.into(), expected_in })
}

/// A prompt that no sequence of `most_tokens` can have is not kept: nothing can be found of it.
fn expected_prompt(message: messages::ExpectedPrompt, most_tokens: usize) -> Result<ExpectedPrompt> {
    let namespace = namespace("expected_prompts", message.salt, message.adapter)?;
    check_tenant("expected_prompts", message.tenant.as_deref())?;
    Ok(ExpectedPrompt {
        expected_in: expected_seconds("expected_prompts.expected_in", message.expected_in.as_ref())?,
        tokens: if message.token_ids.len() > most_tokens { Vec::new() } else { message.token_ids },
        namespace,
        tenant: message.tenant.map(String::into_bytes),
    })
}

/// A time until something that is expected. It has to be set.
fn expected_seconds(field: &str, duration: Option<&Duration>) -> Result<f64> {
    let seconds = duration.map(seconds_of);
    match seconds.filter(|seconds| (0.0..=MAX_EXPECTED_S).contains(seconds)) {
        Some(seconds) => Ok(seconds),
        None => {
            let shown = seconds.map_or_else(|| "not set".to_string(), shown_seconds);
            refused(field, shown, format!("0 s to {MAX_EXPECTED_S} s"))
        }
    }
}

/// The salt and the adapter of a prompt.
pub fn namespace(field: &str, salt: Vec<u8>, adapter: Vec<u8>) -> Result<Namespace> {
    check_bytes(&format!("{field}.salt"), salt.len(), MAX_SALT_BYTES)?;
    if !adapter.is_empty() && adapter.len() != ADAPTER_BYTES {
        let limit = format!("empty, or {ADAPTER_BYTES} bytes");
        return refused(&format!("{field}.adapter"), format!("{} bytes", adapter.len()), limit);
    }
    Ok(Namespace { salt, adapter })
}

/// The numbers of orders that were carried out, and of those that failed.
pub fn disk_report(message: &messages::DiskReport) -> Result<[Vec<u64>; 2]> {
    let numbers = |field: &str, numbers: &[i64]| {
        let number = |number: &i64| match u64::try_from(*number) {
            Ok(number) => Ok(number),
            Err(_) => refused(&format!("disk_report.{field}"), number, "0 or more"),
        };
        numbers.iter().map(number).collect::<Result<Vec<u64>>>()
    };
    Ok([
        numbers("done_order_numbers", &message.done_order_numbers)?,
        numbers("failed_order_numbers", &message.failed_order_numbers)?,
    ])
}

/// The copies on a disk of so many blocks, of a pool with so many layer groups.
pub fn disk_content(
    message: &messages::DiskContent,
    num_disk_blocks: usize,
    num_groups: usize,
) -> Result<Vec<FoundCopy>> {
    let messages::DiskContent { disk_block_ids, prefix_hashes, tenants, tenant_indexes, layer_groups } = message;
    check_count("disk_content.disk_block_ids", disk_block_ids.len(), MAX_FOUND_COPIES)?;
    let (hashes, rest) = prefix_hashes.as_chunks::<32>();
    if hashes.len() != disk_block_ids.len() || !rest.is_empty() {
        let limit = format!("{}, 32 for each of disk_block_ids", 32 * disk_block_ids.len());
        return refused("disk_content.prefix_hashes", format!("{} bytes", prefix_hashes.len()), limit);
    }
    check_parallel("disk_content.tenant_indexes", tenant_indexes.len(), "disk_block_ids", disk_block_ids.len())?;
    if !layer_groups.is_empty() {
        check_parallel("disk_content.layer_groups", layer_groups.len(), "disk_block_ids", disk_block_ids.len())?;
    }
    for tenant in tenants {
        check_length("disk_content.tenants", tenant, MAX_TENANT_LENGTH)?;
    }
    let found = |(((disk, hash), index), group): (((&i32, &[u8; 32]), &i32), &i32)| {
        let Some(tenant) = usize::try_from(*index).ok().and_then(|index| tenants.get(index)) else {
            return refused("disk_content.tenant_indexes", index, format!("0 to {}", tenants.len() as i64 - 1));
        };
        if usize::try_from(*group).is_err() || *group as usize >= num_groups {
            return refused("disk_content.layer_groups", group, format!("0 to {}", num_groups - 1));
        }
        if usize::try_from(*disk).is_err() || *disk as usize >= num_disk_blocks {
            return refused("disk_content.disk_block_ids", disk, format!("0 to {}", num_disk_blocks as i64 - 1));
        }
        let tenant = tenant.clone().into_bytes();
        Ok(FoundCopy { disk: *disk as u32, prefix_hash: *hash, group: *group as Group, tenant })
    };
    let groups = layer_groups.iter().chain(std::iter::repeat(&0));
    disk_block_ids.iter().zip(hashes).zip(tenant_indexes).zip(groups).map(found).collect()
}

fn check_tenant(field: &str, tenant: Option<&str>) -> Result<()> {
    tenant.map_or(Ok(()), |tenant| check_length(&format!("{field}.tenant"), tenant, MAX_TENANT_LENGTH))
}

fn fork(fork: &messages::Fork) -> Result<Fork> {
    if fork.child_sequence_ids.is_empty() {
        return refused("forks.child_sequence_ids", "empty", "at least one sequence");
    }
    Ok(Fork {
        parent_id: fork.parent_sequence_id.into(),
        child_ids: wide(&fork.child_sequence_ids),
        num_tokens: fork.token_count.into(),
    })
}

fn extend_all(extends: &messages::Extends, max_drafts: usize) -> Result<Vec<Extend>> {
    let (seq_ids, counts) = (&extends.sequence_ids, &extends.token_counts);
    let num_sequences = seq_ids.len();
    let mut appends = parts("append", &extends.append_token_counts, &extends.append_token_ids, num_sequences)?;
    let drafts = parts("draft", &extends.draft_token_counts, &extends.draft_token_ids, num_sequences)?;
    check_parallel("extends.token_counts", counts.len(), "extends.sequence_ids", num_sequences)?;
    check_drafts(extends, max_drafts)?;
    let extend = |(seq_id, count): (&i32, &i32)| Extend {
        seq_id: *seq_id,
        num_tokens: (*count).into(),
        append: appends.next().map(<[i32]>::to_vec).unwrap_or_default(),
        has_drafts: false,
    };
    let mut decoded: Vec<Extend> = seq_ids.iter().zip(counts).map(extend).collect();
    for (extend, drafts) in decoded.iter_mut().zip(drafts).filter(|(_, drafts)| !drafts.is_empty()) {
        (extend.has_drafts, extend.append) = (true, drafts.to_vec());
    }
    Ok(decoded)
}

/// A sequence with drafts computes one token and all of them, and nothing is appended.
fn check_drafts(extends: &messages::Extends, max_drafts: usize) -> Result<()> {
    for (index, num_drafts) in extends.draft_token_counts.iter().enumerate().filter(|(_, count)| **count > 0) {
        if *num_drafts as usize > max_drafts {
            return refused("extends.draft_token_counts", num_drafts, format!("0 to {max_drafts}"));
        }
        let (num_tokens, num_appended) = (extends.token_counts[index], extends.append_token_counts.get(index));
        if num_tokens != num_drafts + 1 {
            let limit = format!("{}, 1 more than the drafts", num_drafts + 1);
            return refused("extends.token_counts", num_tokens, limit);
        }
        if let Some(num_appended) = num_appended.filter(|count| **count > 0) {
            return refused("extends.append_token_counts", num_appended, "0 of a sequence with drafts");
        }
    }
    Ok(())
}

/// The parts of a list of tokens that belong to each of the sequences, in their order; none if there are no tokens and no
/// counts. `kind`: of the tokens, as fields name it.
fn parts<'a>(
    kind: &str,
    counts: &'a [i32],
    tokens: &'a [i32],
    num_sequences: usize,
) -> Result<impl Iterator<Item = &'a [i32]>> {
    let mut rest = tokens;
    if !counts.is_empty() || !rest.is_empty() {
        let field = format!("extends.{kind}_token_counts");
        check_parallel(&field, counts.len(), "extends.sequence_ids", num_sequences)?;
        let num_tokens: i64 = counts.iter().copied().map(i64::from).sum();
        if counts.iter().any(|count| *count < 0) || num_tokens != rest.len() as i64 {
            let limit = format!("the {} {kind}_token_ids, none negative", rest.len());
            return refused(&field, format!("{num_tokens} in sum"), limit);
        }
    }
    Ok(counts.iter().map(move |count| {
        let (part, others) = rest.split_at(*count as usize);
        rest = others;
        part
    }))
}

fn restore(restore: &messages::Restore) -> Result<Restore> {
    let max_compute = not_negative("restores.max_compute_token_count", restore.max_compute_token_count)?;
    Ok(Restore { seq_id: restore.sequence_id.into(), max_compute })
}

/// An admission to a pool with sequences of at most `most_tokens`; `field` is its path in the request.
///
/// A longer prompt is not kept: it is replaced by its first token with a reservation of its length, which is refused.
pub fn admission(message: messages::Admission, most_tokens: usize, field: &str) -> Result<Admission> {
    let max_compute = not_negative(&format!("{field}.max_compute_token_count"), message.max_compute_token_count)?;
    let mut reserved_tokens = not_negative(&format!("{field}.reserved_token_count"), message.reserved_token_count)?;
    let namespace = namespace(field, message.salt, message.adapter)?;
    check_tenant(field, message.tenant.as_deref())?;
    let mut tokens = message.token_ids;
    let num_tokens = tokens.len();
    if num_tokens > most_tokens {
        reserved_tokens = reserved_tokens.max(tokens.len());
        tokens = vec![tokens[0]];
    }
    let cache_use = cache_use(message.cache_use, &format!("{field}.cache_use"))?;
    let breakpoints = breakpoints(&message.breakpoints, num_tokens, cache_use, &format!("{field}.breakpoints"))?;
    Ok(Admission {
        seq_id: message.sequence_id.into(),
        tokens,
        max_compute,
        namespace,
        reserved_tokens,
        retention: retention(&message.retention, &format!("{field}.retention"))?,
        resumed: message.resumed,
        cache_use,
        tenant: message.tenant.map(String::into_bytes),
        breakpoints,
        waits_for_prefix: message.waits_for_prefix,
        explains_miss: message.explains_miss,
    })
}

/// The breakpoints of an admission of so many tokens. One without tokens is refused for that.
fn breakpoints(
    breakpoints: &[messages::Breakpoint],
    num_tokens: usize,
    cache_use: CacheUse,
    field: &str,
) -> Result<Vec<Breakpoint>> {
    check_count(field, breakpoints.len(), MAX_BREAKPOINTS)?;
    if !breakpoints.is_empty() && !cache_use.writes() {
        return refused(field, format!("{} entries", breakpoints.len()), "empty with CACHE_USE_NONE");
    }
    let mut least = 1;
    let mut decoded = Vec::with_capacity(breakpoints.len());
    for breakpoint in breakpoints {
        let count = usize::try_from(breakpoint.token_count).unwrap_or(0);
        if !(least..=num_tokens.max(1)).contains(&count) {
            return refused(
                &format!("{field}.token_count"),
                breakpoint.token_count,
                format!("{least} to {num_tokens}"),
            );
        }
        decoded.push(Breakpoint { num_tokens: count, ttl: kept_seconds(breakpoint.ttl.as_ref(), field)? });
        least = count + 1;
    }
    Ok(decoded)
}

/// The time for which a breakpoint keeps. It has to be set.
fn kept_seconds(ttl: Option<&Duration>, field: &str) -> Result<f64> {
    let seconds = ttl.map(seconds_of);
    match seconds.filter(|seconds| (LEAST_KEEP_S..=MAX_KEEP_S).contains(seconds)) {
        Some(seconds) => Ok(seconds),
        None => {
            let shown = seconds.map_or_else(|| "not set".to_string(), shown_seconds);
            refused(&format!("{field}.ttl"), shown, format!("{LEAST_KEEP_S} s to {MAX_KEEP_S} s"))
        }
    }
}

fn cache_use(value: i32, field: &str) -> Result<CacheUse> {
    match messages::CacheUse::try_from(value) {
        Ok(messages::CacheUse::Unspecified | messages::CacheUse::ReadAndWrite) => Ok(CacheUse::ReadAndWrite),
        Ok(messages::CacheUse::WriteOnly) => Ok(CacheUse::WriteOnly),
        Ok(messages::CacheUse::None) => Ok(CacheUse::None),
        Err(_) => refused(field, value, "a number of CacheUse, 0 to 3"),
    }
}

fn host_copy_use(value: i32) -> Result<HostCopyUse> {
    match messages::HostCopyUse::try_from(value) {
        Ok(messages::HostCopyUse::Unspecified | messages::HostCopyUse::ThereAndBack) => Ok(HostCopyUse::ThereAndBack),
        Ok(messages::HostCopyUse::Back) => Ok(HostCopyUse::Back),
        Ok(messages::HostCopyUse::None) => Ok(HostCopyUse::None),
        Err(_) => refused("host_copy_use", value, "a number of HostCopyUse, 0 to 3"),
    }
}

fn retention(ranges: &[messages::Retention], field: &str) -> Result<Vec<Retention>> {
    check_count(field, ranges.len(), MAX_RANGES)?;
    let range = |(index, range)| retained(range, field, index + 1 == ranges.len());
    ranges.iter().enumerate().map(range).collect()
}

fn retained(range: &messages::Retention, field: &str, is_last: bool) -> Result<Retention> {
    let num_tokens = not_negative(&format!("{field}.token_count"), range.token_count)?;
    if num_tokens == 0 && !is_last {
        return refused(&format!("{field}.token_count"), 0, "at least 1 but in the last range");
    }
    let level = level(&format!("{field}.priority"), range.priority)?;
    let ttl = range.ttl.as_ref().map(seconds_of);
    if let Some(seconds) = ttl.filter(|seconds| !(*seconds > 0.0 && *seconds <= MAX_RETENTION_S)) {
        let limit = format!("more than 0 s, at most {MAX_RETENTION_S} s");
        return refused(&format!("{field}.ttl"), shown_seconds(seconds), limit);
    }
    Ok(Retention { num_tokens, level, ttl })
}

/// The report in a worker's message; None if that is something else.
pub fn report_on_stream(body: &[u8]) -> std::result::Result<Option<messages::StepReport>, DecodeError> {
    Ok(match messages::AttachPoolRequest::decode(body)?.message {
        Some(messages::attach_pool_request::Message::StepReport(report)) => Some(report),
        _ => None,
    })
}

/// The report of a step of a pool with so many sequences. Refused (INVALID_ARGUMENT) for lists that do not fit together
/// and values out of range.
pub fn step_report(message: messages::StepReport, max_sequences: usize) -> Result<StepReport> {
    let most = 2 * max_sequences; // extends; restores and admissions
    let (runs, sampled) = (message.sequence_ids.len(), message.sampled_sequence_ids.len());
    check_count("step_report.sequence_ids", runs, most)?;
    check_count("step_report.sampled_sequence_ids", sampled, most)?;
    let step_number = number("step_report.step_number", message.step_number)?;
    let outcome = match messages::StepOutcome::try_from(message.outcome) {
        Ok(messages::StepOutcome::Computed) => StepOutcome::Computed,
        Ok(messages::StepOutcome::Failed) => StepOutcome::Failed,
        Ok(messages::StepOutcome::Skipped) => StepOutcome::Skipped,
        _ => return refused("step_report.outcome", message.outcome, "COMPUTED, FAILED or SKIPPED"),
    };
    let num_counts = message.computed_token_counts.len();
    check_parallel("step_report.computed_token_counts", num_counts, "sequence_ids", runs)?;
    check_sampled(&message)?;
    Ok(StepReport {
        step_number,
        outcome,
        seq_ids: message.sequence_ids,
        token_counts: message.computed_token_counts,
        sampled_ids: message.sampled_sequence_ids,
        sampled_tokens: message.sampled_token_ids,
        sampled_counts: message.sampled_token_counts,
        report_number: number("step_report.report_number", message.report_number)?,
    })
}

/// One sampled token of each sequence, or as many as there are counted.
fn check_sampled(message: &messages::StepReport) -> Result<()> {
    let (sampled, counts) = (message.sampled_sequence_ids.len(), &message.sampled_token_counts);
    let num_tokens = message.sampled_token_ids.len();
    if counts.is_empty() {
        return check_parallel("step_report.sampled_token_ids", num_tokens, "sampled_sequence_ids", sampled);
    }
    check_parallel("step_report.sampled_token_counts", counts.len(), "sampled_sequence_ids", sampled)?;
    let num_counted: i64 = counts.iter().copied().map(i64::from).sum();
    if counts.iter().any(|count| *count < 1) || num_counted != num_tokens as i64 {
        let limit = format!("the {num_tokens} sampled_token_ids, each at least 1");
        return refused("step_report.sampled_token_counts", format!("{num_counted} in sum"), limit);
    }
    Ok(())
}

/// The number of a step or of a report, if it is not negative.
fn number(field: &str, value: i64) -> Result<u64> {
    u64::try_from(value).or_else(|_| refused(field, value, "at least 0"))
}

fn seconds_of(duration: &Duration) -> f64 {
    duration.seconds as f64 + f64::from(duration.nanos) / 1e9
}

//! The arguments' values, checked.

use std::time::Duration;

use proc_macro2::Span;
use syn::{Ident, Index, Member};

use super::{Field, OnConflict, Probe, Settings, Source};
use crate::diagnostics::{Diagnostics, did_you_mean, list};
use crate::duration;
use crate::parse::{Argument, Arguments, Name, Text};
use crate::paths::DefaultCrate;

/// The longest consumer name, as idem-core has it. So are the limits below; a test compares them.
const MAX_CONSUMER_CHARS: usize = 100;
const MIN_LEASE: Duration = Duration::from_millis(300);
const MAX_LEASE: Duration = Duration::from_secs(24 * 3600);

impl Settings {
    /// Checks all arguments. What is wrong is left out, and `diagnostics` says so.
    pub(crate) fn check(arguments: &Arguments, default_crate: DefaultCrate, diagnostics: &mut Diagnostics) -> Self {
        check_required(arguments, diagnostics);
        let given = |name| arguments.get(name);
        Self {
            krate: given(Name::Crate)
                .and_then(|argument| argument.path(diagnostics))
                .unwrap_or_else(|| default_crate.path()),
            key: given(Name::Key).map(|argument| sources(argument, diagnostics)).unwrap_or_default(),
            consumer: given(Name::Consumer).and_then(|argument| consumer(argument, diagnostics)).unwrap_or_default(),
            lease: given(Name::Lease).and_then(|argument| lease(argument, diagnostics)),
            max_run: given(Name::MaxRun).and_then(|argument| max_run(argument, diagnostics)),
            attempts: given(Name::Attempts).and_then(|argument| attempts(argument, diagnostics)),
            backoff: given(Name::Backoff).and_then(|argument| backoff(argument, diagnostics)),
            fingerprint: given(Name::Fingerprint)
                .map(|argument| fingerprint(argument, diagnostics))
                .unwrap_or_default(),
            domain_unique: given(Name::DomainUnique)
                .map(|argument| domain_unique(argument, diagnostics))
                .unwrap_or_default(),
            on_conflict: given(Name::OnConflict).and_then(|argument| on_conflict(argument, diagnostics)),
            lock: given(Name::Lock).map(|argument| sources(argument, diagnostics)).unwrap_or_default(),
            probe: given(Name::Probe).and_then(|argument| probe(argument, diagnostics)),
        }
    }
}

/// An argument that may be the misspelled one is not also called missing.
fn check_required(arguments: &Arguments, diagnostics: &mut Diagnostics) {
    let missing: Vec<String> = [Name::Key, Name::Consumer]
        .into_iter()
        .filter(|name| arguments.get(*name).is_none())
        .map(|name| format!("`{}`", name.example()))
        .collect();
    if !missing.is_empty() && !arguments.any_unknown {
        diagnostics.error(Span::call_site(), format!("`#[idempotent]` lacks {}", missing.join(" and ")));
    }
}

/// Of a key or a lock.
fn sources(argument: &Argument, diagnostics: &mut Diagnostics) -> Vec<Source> {
    let written = argument.sources(diagnostics);
    check_distinct(&written, argument.name, diagnostics);
    written.into_iter().filter_map(|text| source(argument.name, text, diagnostics)).collect()
}

fn source(argument: Name, written: Text, diagnostics: &mut Diagnostics) -> Option<Source> {
    if names_a_delivery(&written.text) {
        let wrong = match argument {
            Name::Lock => "not a state: no two messages would share the lock",
            _ => "not the job: a copy of the message would take effect again",
        };
        let message = format!(
            "\"{}\" names one delivery, {wrong}; name a field of the event, or a header as `header:<name>`",
            written.text
        );
        diagnostics.error(written.span, message);
        return None;
    }
    match written.text.split_once(':') {
        None => field(written, diagnostics).map(Source::Field),
        Some(("header", name)) => header(name, written.span, diagnostics).map(Source::Header),
        Some((prefix, _)) => {
            let message = format!(
                "unknown {} source `{prefix}:`; write the path of a field such as `order_id` or `order.id`, or \
                 `header:<name>`",
                argument.as_str()
            );
            diagnostics.error(written.span, message);
            None
        }
    }
}

/// Whether a source names where or when the message was delivered, as `kafka:offset` or `topic/partition/offset`.
fn names_a_delivery(source: &str) -> bool {
    let mut parts = source.split(['/', ':']);
    let is_field = !source.contains(['/', ':']);
    let is_header = source.starts_with("header:");
    !is_field && !is_header && parts.any(|part| matches!(part, "offset" | "partition" | "topic" | "timestamp"))
}

fn header(name: &str, span: Span, diagnostics: &mut Diagnostics) -> Option<Text> {
    if name.is_empty() || name.trim() != name {
        diagnostics.error(span, "a header needs its name, without spaces around it: `header:idempotency-key`");
        return None;
    }
    // The one name that is compared without regard to case, by this spelling.
    let usual = "idempotency-key";
    let name = if name.eq_ignore_ascii_case(usual) { usual } else { name };
    Some(Text { text: name.to_owned(), span })
}

/// Turns `order.id` into the members `order` and `id`.
fn field(path: Text, diagnostics: &mut Diagnostics) -> Option<Field> {
    let members: Option<Vec<Member>> = path.text.split('.').map(|segment| member(segment, path.span)).collect();
    if let Some(members) = members {
        return Some(Field { path, members });
    }
    let has_empty = path.text.split('.').any(|segment| segment.trim().is_empty());
    let wrong = if has_empty { "has an empty segment" } else { "is not the path of a field" };
    diagnostics.error(path.span, format!("\"{}\" {wrong}: write `order_id` or `order.id`", path.text));
    None
}

/// A field's name or, in a tuple struct, its number. Keywords are taken as raw identifiers.
fn member(segment: &str, span: Span) -> Option<Member> {
    if let Ok(index) = segment.parse::<u32>() {
        return Some(Member::Unnamed(Index { index, span }));
    }
    let name = segment.strip_prefix("r#").unwrap_or(segment);
    let letters = name.chars().all(|c| c.is_alphanumeric() || c == '_');
    if name.is_empty() || !letters || matches!(name, "_" | "self" | "Self" | "super" | "crate") {
        return None;
    }
    let plain = syn::parse_str::<Ident>(name).map(|_| Ident::new(name, span));
    let raw = || syn::parse_str::<Ident>(&format!("r#{name}")).map(|_| Ident::new_raw(name, span));
    plain.or_else(|_| raw()).ok().map(Member::Named)
}

fn check_distinct(written: &[Text], name: Name, diagnostics: &mut Diagnostics) {
    for (position, text) in written.iter().enumerate() {
        if written[..position].iter().any(|earlier| earlier.text == text.text) {
            diagnostics.error(text.span, format!("`{}` names `{}` twice", name.as_str(), text.text));
        }
    }
}

fn consumer(argument: &Argument, diagnostics: &mut Diagnostics) -> Option<String> {
    let Text { text: name, span } = argument.text(diagnostics)?;
    let begins_well = name.starts_with(|c: char| c.is_ascii_alphanumeric());
    let all_allowed = name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'));
    if begins_well && all_allowed && name.len() <= MAX_CONSUMER_CHARS {
        return Some(name);
    }
    let message = format!(
        "\"{name}\" cannot be a consumer's name: use 1 to {MAX_CONSUMER_CHARS} of a-z, A-Z, 0-9, `.`, `_`, `-`, beginning \
         with a letter or digit"
    );
    diagnostics.error(span, message);
    None
}

fn lease(argument: &Argument, diagnostics: &mut Diagnostics) -> Option<Duration> {
    let (lease, span) = one_duration(argument, diagnostics)?;
    let fits = (MIN_LEASE..=MAX_LEASE).contains(&lease);
    if !fits {
        diagnostics.error(span, format!("`lease` is {}, but must be 300ms to 24h", duration::text(lease)));
    }
    fits.then_some(lease)
}

fn max_run(argument: &Argument, diagnostics: &mut Diagnostics) -> Option<Duration> {
    let (max_run, span) = one_duration(argument, diagnostics)?;
    let fits = !max_run.is_zero() && max_run <= MAX_LEASE;
    if !fits {
        diagnostics.error(span, format!("`max_run` is {}, but must be 1ms to 24h", duration::text(max_run)));
    }
    fits.then_some(max_run)
}

fn one_duration(argument: &Argument, diagnostics: &mut Diagnostics) -> Option<(Duration, Span)> {
    let text = argument.text_for("a duration with its unit", diagnostics)?;
    Some((read_duration(argument.name, &text.text, text.span, diagnostics)?, text.span))
}

fn read_duration(name: Name, text: &str, span: Span, diagnostics: &mut Diagnostics) -> Option<Duration> {
    duration::parse(text).map_err(|wrong| diagnostics.error(span, format!("`{}`: {wrong}", name.as_str()))).ok()
}

fn attempts(argument: &Argument, diagnostics: &mut Diagnostics) -> Option<u32> {
    let (attempts, span) = argument.whole_number(diagnostics)?;
    if attempts == 0 {
        diagnostics.error(span, "`attempts` is 0: no job would ever run; write at least 1");
        return None;
    }
    Some(attempts)
}

fn backoff(argument: &Argument, diagnostics: &mut Diagnostics) -> Option<(Duration, Duration)> {
    let text = argument.text_for("two durations with their units", diagnostics)?;
    let Some((base, cap)) = text.text.split_once("..") else {
        let message = format!("`backoff` is the first wait and the longest: write `{}`", argument.name.example());
        diagnostics.error(text.span, message);
        return None;
    };
    let base = read_duration(argument.name, base, text.span, diagnostics);
    let cap = read_duration(argument.name, cap, text.span, diagnostics);
    let (base, cap) = (base?, cap?);
    if base > cap {
        let (base, cap) = (duration::text(base), duration::text(cap));
        diagnostics.error(text.span, format!("`backoff` begins at {base}, above its end {cap}"));
        return None;
    }
    Some((base, cap))
}

fn fingerprint(argument: &Argument, diagnostics: &mut Diagnostics) -> Vec<Field> {
    let written = argument.sources(diagnostics);
    check_distinct(&written, argument.name, diagnostics);
    written.into_iter().filter_map(|text| compared_field(text, diagnostics)).collect()
}

fn compared_field(written: Text, diagnostics: &mut Diagnostics) -> Option<Field> {
    if written.text.starts_with("header:") {
        diagnostics.error(written.span, "`fingerprint` compares what the event says: name its fields, not headers");
        return None;
    }
    field(written, diagnostics)
}

fn domain_unique(argument: &Argument, diagnostics: &mut Diagnostics) -> Vec<String> {
    let constraints = argument.texts(diagnostics);
    check_distinct(&constraints, argument.name, diagnostics);
    for constraint in constraints.iter().filter(|constraint| constraint.text.trim().is_empty()) {
        diagnostics.error(constraint.span, "`domain_unique` needs the constraint's name");
    }
    constraints.into_iter().map(|constraint| constraint.text).collect()
}

fn on_conflict(argument: &Argument, diagnostics: &mut Diagnostics) -> Option<OnConflict> {
    const CHOICES: &[&str] = &["dead_letter", "skip", "stop"];
    let Text { text, span } = argument.text(diagnostics)?;
    match text.as_str() {
        "dead_letter" => Some(OnConflict::DeadLetter),
        "skip" => Some(OnConflict::Skip),
        "stop" => Some(OnConflict::Stop),
        _ => {
            let suggestion = did_you_mean(&text, CHOICES);
            let message = format!("unknown `on_conflict` \"{text}\"{suggestion}; expected one of: {}", list(CHOICES));
            diagnostics.error(span, message);
            None
        }
    }
}

fn probe(argument: &Argument, diagnostics: &mut Diagnostics) -> Option<Probe> {
    let function = argument.function(diagnostics)?;
    Some(Probe { function, name_span: argument.name_span })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limits_are_those_of_core() {
        assert_eq!(MAX_CONSUMER_CHARS, idem_core::MAX_CONSUMER_CHARS);
        assert_eq!((MIN_LEASE, MAX_LEASE), (idem_core::MIN_LEASE, idem_core::MAX_LEASE));
    }

    #[test]
    fn the_documented_defaults_are_those_of_core() {
        let policy = idem_core::Policy::default();
        let backoff = format!("{}..{}", duration::text(policy.backoff.base), duration::text(policy.backoff.cap));
        let documented = include_str!("../idempotent.md");
        for row in [
            format!("| `lease = \"{0}\"` | {0} |", duration::text(policy.lease)),
            format!("| `max_run = \"{0}\"` | {0} |", duration::text(policy.max_run)),
            format!("| `attempts = {0}` | {0} |", policy.attempts),
            format!("| `backoff = \"{backoff}\"` | {backoff} |"),
        ] {
            assert!(documented.contains(&row), "{row}");
        }
    }

    #[test]
    fn what_names_a_delivery_is_told_from_a_field() {
        for source in
            ["kafka:offset", "topic/partition/offset", "kafka:topic/partition/offset", "offset:", "partition:1"]
        {
            assert!(names_a_delivery(source), "{source}");
        }
        for source in ["offset", "order.offset", "header:offset", "kafka:key", "ce:id"] {
            assert!(!names_a_delivery(source), "{source}");
        }
    }

    #[test]
    fn a_segment_is_a_field_of_rust() {
        for segment in ["order_id", "type", "r#type", "0", "straße"] {
            assert!(member(segment, Span::call_site()).is_some(), "{segment}");
        }
        for segment in ["", " id", "order id", "id()", "self", "_", "1a", "-1", "order-id"] {
            assert!(member(segment, Span::call_site()).is_none(), "{segment}");
        }
    }
}

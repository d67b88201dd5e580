//! Names that plainly say: this value was made when the message came (K2).

/// Without case, `_` and `-`. Only names that mean nothing else: `created_at`, `delivered_at` or `correlation_id` can belong
/// to the business operation.
const AT_RECEIPT: &[&str] = &[
    "receivedat",
    "receipttime",
    "processedat",
    "ingestedat",
    "requesttime",
    "now",
    "traceid",
    "traceparent",
    "spanid",
];

/// The name as an identifier, if it is one of these. Headers may have the usual `x-` in front.
pub(super) fn at_receipt(name: &str) -> Option<String> {
    let letters: String = name.chars().filter(|c| !matches!(c, '_' | '-')).collect::<String>().to_lowercase();
    let is_header = name.contains('-');
    let bare = if is_header { letters.strip_prefix('x').unwrap_or(&letters) } else { &letters };
    AT_RECEIPT.contains(&bare).then(|| name.trim_start_matches("r#").replace('-', "_"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn k2_only_names_that_plainly_mean_receipt_are_found() {
        for (name, found) in [
            ("received_at", "received_at"),
            ("receivedAt", "receivedAt"),
            ("processed_at", "processed_at"),
            ("now", "now"),
            ("trace-id", "trace_id"),
            ("X-Trace-Id", "X_Trace_Id"),
            ("traceparent", "traceparent"),
        ] {
            assert_eq!(at_receipt(name).as_deref(), Some(found), "{name}");
        }
        for name in [
            "order_id",
            "created_at",
            "paid_at",
            "delivered_at",
            "correlation_id",
            "idempotency-key",
            "request_id",
            "known",
            "unreceived_at",
            "xnow",
            "",
        ] {
            assert_eq!(at_receipt(name), None, "{name}");
        }
    }

    #[test]
    fn the_documentation_lists_every_name() {
        let documented = include_str!("../idempotent.md").replace('_', "");
        for name in AT_RECEIPT {
            assert!(documented.contains(&format!("`{name}`")), "{name}");
        }
    }
}

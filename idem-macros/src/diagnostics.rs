//! Collects the errors of one use of a macro, so that all of them are reported together.

use proc_macro2::{Span, TokenStream};
use quote::ToTokens;

/// The errors found so far. Must be [finished](Self::finish): a mistake that is found and then forgotten would let a
/// wrong handler compile.
#[derive(Debug)]
pub(crate) struct Diagnostics {
    errors: Vec<syn::Error>,
    read: bool,
}

impl Diagnostics {
    pub(crate) fn new() -> Self {
        Self { errors: Vec::new(), read: false }
    }

    /// Adds an error at `span`.
    pub(crate) fn error(&mut self, span: Span, message: impl Into<String>) {
        self.errors.push(syn::Error::new(span, message.into()));
    }

    /// Adds an error that underlines all of `tokens`.
    pub(crate) fn error_on(&mut self, tokens: impl ToTokens, message: impl Into<String>) {
        self.errors.push(syn::Error::new_spanned(tokens, message.into()));
    }

    /// Adds the parser's own error.
    pub(crate) fn parser(&mut self, error: syn::Error) {
        self.errors.push(error);
    }

    /// How many errors there are.
    pub(crate) fn count(&self) -> usize {
        self.errors.len()
    }

    /// All errors as tokens, if there are any.
    pub(crate) fn finish(mut self) -> Option<TokenStream> {
        self.read = true;
        (!self.errors.is_empty()).then(|| self.errors.iter().map(syn::Error::to_compile_error).collect())
    }
}

impl Drop for Diagnostics {
    fn drop(&mut self) {
        // A panic during a panic would abort the compiler and hide the first one.
        if !self.read && !std::thread::panicking() {
            panic!("idem-macros: diagnostics were dropped without being reported");
        }
    }
}

/// `` (did you mean `consumer`?)`` for a name that is nearly one of `allowed`, else nothing.
pub(crate) fn did_you_mean(written: &str, allowed: &[&str]) -> String {
    let nearest = allowed.iter().map(|name| (distance(written, name), *name)).min();
    match nearest {
        // Two slips in a long name are a slip; in a short one they are another word.
        Some((edits, name)) if edits <= 2 && edits * 3 <= name.len() => format!(" (did you mean `{name}`?)"),
        _ => String::new(),
    }
}

/// `` `a`, `b`, `c` ``
pub(crate) fn list(names: &[&str]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

/// How many letters must be added, removed, replaced or swapped with their neighbour to make `a` into `b`.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows: Vec<Vec<usize>> = vec![(0..=b.len()).collect()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut best = replaced.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            row.push(best);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALLOWED: &[&str] = &["key", "consumer", "attempts", "max_run"];

    #[test]
    fn near_names_are_suggested_and_far_ones_are_not() {
        for (written, suggestion) in
            [("consumr", "consumer"), ("kye", "key"), ("atempts", "attempts"), ("max_runs", "max_run")]
        {
            assert_eq!(did_you_mean(written, ALLOWED), format!(" (did you mean `{suggestion}`?)"));
        }
        for written in ["topic", "k", "retries", ""] {
            assert_eq!(did_you_mean(written, ALLOWED), "", "{written}");
        }
    }

    #[test]
    #[should_panic(expected = "dropped without being reported")]
    fn forgotten_errors_are_a_bug_of_ours() {
        drop(Diagnostics::new());
    }
}

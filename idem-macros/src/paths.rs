//! `crate = …`, and every name that the expansion makes. They begin with `__`, so that they meet none of the user's.

use proc_macro2::{Span, TokenStream};
use quote::format_ident;
use syn::{Ident, Path, parse_quote};

/// Where generated code finds idem-core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DefaultCrate {
    /// The user depends on idem-core.
    Core,
    /// The user depends on idem-kafka alone, which shows idem-core as its module `core`.
    Kafka,
}

impl DefaultCrate {
    /// The path, if the user gives none.
    pub(crate) fn path(self) -> Path {
        match self {
            DefaultCrate::Core => parse_quote!(::idem_core),
            DefaultCrate::Kafka => parse_quote!(::idem_kafka::core),
        }
    }
}

/// The items that generated code calls, under a short name. In scope only inside the generated constant.
pub(crate) fn import(krate: &Path) -> TokenStream {
    let alias = alias();
    quote::quote!(use #krate::__private as #alias;)
}

/// The short name.
pub(crate) fn alias() -> Ident {
    generated("idem")
}

/// A generated name.
pub(crate) fn generated(name: &str) -> Ident {
    generated_at(name, Span::call_site())
}

/// A generated name for which errors are shown at `span`.
pub(crate) fn generated_at(name: &str, span: Span) -> Ident {
    format_ident!("__{name}", span = span)
}
